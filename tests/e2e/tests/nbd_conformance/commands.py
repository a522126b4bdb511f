# Each command over each form of requests and replies that this libnbd knows, with what is allowed and what isn't.
#
# Arguments: the server's socket, and the size of its disks in bytes. The exports are `a`, `ro` (read-only) and `cached` (with a page cache).
import errno
import sys

import nbd

socket, size = sys.argv[1], int(sys.argv[2])

MIB = 1 << 20
BASE, CACHE = "base:allocation", "x-pvblk:cache"
HAS_EXTENDED = hasattr(nbd.NBD, "set_request_extended_headers")
FORMS = ["simple", "structured"] + (["extended"] if HAS_EXTENDED else [])


def connect(form, export="a", contexts=(BASE,)):
    h = nbd.NBD()
    # The library keeps nothing back that the server is to refuse. It still says that a payload follows.
    h.set_strict_mode(getattr(nbd, "STRICT_AUTO_FLAG", 0))
    h.set_request_structured_replies(form != "simple")
    if HAS_EXTENDED:
        h.set_request_extended_headers(form == "extended")
    for context in contexts:
        h.add_meta_context(context)
    h.set_export_name(export)
    h.connect_unix(socket)
    assert h.get_structured_replies_negotiated() == (form != "simple"), form
    if HAS_EXTENDED:
        assert h.get_extended_headers_negotiated() == (form == "extended"), form
    return h


def refused(want, what, call):
    try:
        call()
    except nbd.Error as e:
        assert e.errnum == want, f"{what}: {e.errnum} ({e}), not {want}"
    else:
        raise AssertionError(f"{what}: it is done")


def status(h, count, offset, flags=0):
    """Extents by context: lengths and flags."""
    found = {}

    def extent(context, at, entries, error):
        assert at == offset and error.value == 0
        found[context] = list(zip(entries[::2], entries[1::2]))

    h.block_status(count, offset, extent, flags)
    return found


def good(h, form):
    data = bytes(range(256)) * 20
    # At any byte, of any length, also none.
    for offset, length in [(1, 5000), (4096, 4096), (511, 3), (0, 512), (size - 1, 1)]:
        h.pwrite(data[:length], offset)
        assert h.pread(length, offset) == data[:length]
    h.pwrite(data, 70000, nbd.CMD_FLAG_FUA)
    h.zero(1000, 70100)
    h.zero(1000, 71100, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
    got = h.pread(len(data), 70000)
    assert got == data[:100] + bytes(2000) + data[2100:]
    h.zero(4096, 65536, nbd.CMD_FLAG_FAST_ZERO)
    h.trim(8192, 65536)
    h.trim(3, 65537, nbd.CMD_FLAG_FUA)
    h.flush()
    h.pwrite(b"", 0)
    assert h.pread(0, 0) == b""
    h.trim(0, 0)
    h.zero(0, 0)
    assert h.pread(32 * MIB, 0)[:512] == data[:512]
    h.pwrite(bytes(32 * MIB), 32 * MIB)
    if form == "simple":
        return
    assert h.pread(512, 0, nbd.CMD_FLAG_DF) == data[:512]
    told = status(h, size, 0)
    assert list(told) == [BASE] and all(length > 0 for length, _ in told[BASE]), told
    one = status(h, 4096, 1, nbd.CMD_FLAG_REQ_ONE)
    assert len(one[BASE]) == 1 and one[BASE][0][0] <= 4096, one


def bad(h, form):
    ignore = lambda *_: 0
    einval = [
        ("a read past the end", lambda: h.pread(2, size - 1)),
        ("a read far behind it", lambda: h.pread(512, 1 << 62)),
        ("a read of 32 MiB and a byte", lambda: h.pread(32 * MIB + 1, 0)),
        ("a trim past the end", lambda: h.trim(4096, size - 4095)),
        ("a read with a writer's flag", lambda: h.pread(512, 0, nbd.CMD_FLAG_NO_HOLE)),
        ("a read with an unknown flag", lambda: h.pread(512, 0, 1 << 14)),
        ("a write with an unknown flag", lambda: h.pwrite(bytes(512), 0, 1 << 14)),
        ("a write with a reader's flag", lambda: h.pwrite(bytes(512), 0, nbd.CMD_FLAG_DF)),
        ("a flush with an unknown flag", lambda: h.flush(1 << 14)),
        ("a trim with a flag of zeroes", lambda: h.trim(4096, 0, nbd.CMD_FLAG_FAST_ZERO)),
        ("zeroes with an unknown flag", lambda: h.zero(4096, 0, 1 << 14)),
        ("a cache command without a cache", lambda: h.cache(4096, 0)),
        ("a status of nothing", lambda: h.block_status(0, 0, ignore)),
        ("a status past the end", lambda: h.block_status(2, size - 1, ignore)),
        ("a status with a flag of zeroes", lambda: h.block_status(512, 0, ignore, nbd.CMD_FLAG_NO_HOLE)),
    ]
    if form == "simple":
        einval.append(("one chunk without chunks", lambda: h.pread(512, 0, nbd.CMD_FLAG_DF)))
        einval = [one for one in einval if "status" not in one[0]]
    for what, call in einval:
        refused(errno.EINVAL, what, call)
    for what, call in [
        ("a write past the end", lambda: h.pwrite(b"xy", size - 1)),
        ("a write behind the end", lambda: h.pwrite(bytes(512), size)),
        ("zeroes past the end", lambda: h.zero(2, size - 1)),
    ]:
        refused(errno.ENOSPC, what, call)
    # Nothing of that ends the connection.
    assert h.pread(3, 0) == bytes([0, 1, 2]) and not h.aio_is_dead()


def long_write(form):
    """A payload of more than 32 MiB: read and refused, but with extended headers the end."""
    h = connect(form)
    if form != "extended":
        refused(errno.EINVAL, "a write of 32 MiB and a byte", lambda: h.pwrite(bytes(32 * MIB + 1), 0))
        assert h.pread(3, 0) == bytes([0, 1, 2])
        return
    try:
        h.pwrite(bytes(32 * MIB + 1), 0)
    except nbd.Error:
        pass
    else:
        raise AssertionError("a payload that is too long is taken")
    assert h.aio_is_dead() or h.aio_is_closed()


def read_only(form):
    h = connect(form, "ro")
    assert h.is_read_only()
    for what, call in [
        ("a write", lambda: h.pwrite(bytes(512), 0)),
        ("zeroes", lambda: h.zero(512, 0)),
        ("a trim", lambda: h.trim(4096, 0)),
    ]:
        refused(errno.EPERM, f"{what} to a read-only disk", call)
    h.flush()
    assert len(h.pread(512, 0)) == 512
    h.shutdown()


def cached(form):
    """Two contexts, and the command that fills the cache."""
    h = connect(form, "cached", (BASE, CACHE))
    assert h.can_cache()
    h.pwrite(bytes([7]) * 8192, 1 * MIB)
    h.cache(4096, 2 * MIB)
    if form == "simple":
        return
    assert h.can_meta_context(BASE) and h.can_meta_context(CACHE)
    told = status(h, 4 * MIB, 0)
    assert sorted(told) == sorted([BASE, CACHE]), told
    at, flags = 0, {}
    for length, flag in told[CACHE]:
        flags[at], at = flag, at + length
    # Dirty is a moment's state: only what is written out is sure.
    assert flags[1 * MIB] & 1 and flags[2 * MIB] == 1, told[CACHE]
    h.flush()
    assert status(h, 8192, 1 * MIB, nbd.CMD_FLAG_REQ_ONE)[CACHE] == [(8192, 1)]
    if form == "extended":
        some = {}

        def extent(context, at, entries, error):
            some[context] = entries

        for wanted in [[CACHE], [BASE], [BASE, CACHE]]:
            some.clear()
            h.block_status_filter(4 * MIB, 0, wanted, extent)
            assert sorted(some) == sorted(wanted), some
        assert h.can_block_status_payload()
        # The plain disk has no such context, and none is invented for it.
        plain = connect(form, "a", (BASE, CACHE))
        assert not plain.can_meta_context(CACHE)
    h.shutdown()


def contexts_listed():
    h = nbd.NBD()
    h.set_opt_mode(True)
    h.connect_unix(socket)

    def listed(export, queries):
        names = []
        h.set_export_name(export)
        h.clear_meta_contexts()
        for query in queries:
            h.add_meta_context(query)
        h.opt_list_meta_context(lambda name: names.append(name))
        return names

    assert listed("cached", []) == [BASE, CACHE]
    assert listed("a", []) == [BASE]
    assert listed("cached", ["x-pvblk:"]) == [CACHE]
    assert listed("cached", ["base:"]) == [BASE]
    assert listed("cached", ["qemu:", "x-pvblk:dirty"]) == []
    try:
        listed("cached", [f"x-{n}:" for n in range(100)])
    except nbd.Error:
        pass
    else:
        raise AssertionError("a hundred queries are answered")
    h.opt_abort()


for form in FORMS:
    h = connect(form)
    good(h, form)
    bad(h, form)
    h.shutdown()
    long_write(form)
    read_only(form)
    cached(form)
contexts_listed()
print("forms:", *FORMS)
