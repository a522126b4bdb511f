#!/usr/bin/env bash
# Runs a script as root in the Linux guest of guest.sh, which a libvirtd starts: under QEMU, in software.
#
#   tests/vm/libvirt.sh --script FILE --out DIR --with XML [--add FILE]... [--seconds N]
#
# XML has what the domain has besides kernel, console and result: elements of <domain> (memoryBacking, say), and of its <devices>, with targets vda and so
# on. The script's arguments are the paths of those disks. The libvirtd is Debian's, with settings, state and sockets of its own in a mount namespace, so
# that one that serves this machine isn't touched. The rest is as for guest.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
arguments "$@"
[ -f "$with" ] || usage '--with is needed, a file'
for program in libvirtd virsh qemu-system-x86_64 readelf sha256sum timeout unshare; do
    command -v "$program" >/dev/null || cannot "$program is not installed"
done
[ "$(id -u)" -eq 0 ] || cannot 'libvirtd with a state of its own needs root'
unshare --mount true 2>/dev/null || cannot 'no mount namespaces here'

make_image() {
    unpack_kernel "$1/kernel"
    make_initramfs "$1/initramfs" "$modules"
}

cached_image guest
prepare_run

mapfile -t targets < <(sed -n "s/.*<target dev='\(vd[a-o]\)'.*/\/dev\/\1/p" "$with")
# The guest names its disks in their order, whatever the domain calls them.
letters=abcdefghijklmnop
result=vd${letters:${#targets[@]}:1}
disk() { sed -n "/<disk /,/<\/disk>/p" "$with"; }
append="console=ttyS0 loglevel=4 panic=-1 mitigations=off cryptomgr.notests no_timer_check"
append+=" disks=$(IFS=, && echo "${targets[*]}") result=/dev/$result"
{
    # One CPU: QEMU's translation with a thread for each is what guest.sh avoids, and libvirt has no word for it.
    echo "<domain type='qemu'><name>guest</name><memory unit='MiB'>$memory_mb</memory><vcpu>1</vcpu>"
    sed "/<disk /,/<\/disk>/d" "$with"
    echo "<os><type arch='x86_64' machine='q35'>hvm</type><kernel>$image/kernel</kernel><initrd>$run/initrd</initrd>"
    echo "<cmdline>$append</cmdline></os><features><acpi/></features><cpu mode='maximum'/>"
    echo "<on_poweroff>destroy</on_poweroff><on_reboot>destroy</on_reboot><on_crash>destroy</on_crash>"
    echo "<devices><emulator>$(command -v qemu-system-x86_64)</emulator>"
    disk
    echo "<disk type='file' device='disk'><driver name='qemu' type='raw' cache='unsafe'/><source file='$run/out'/><target dev='$result' bus='virtio'/></disk>"
    echo "<serial type='file'><source path='$run/console'/></serial><memballoon model='none'/></devices></domain>"
} >"$run/domain.xml"

# Ends with 0 when the guest has ended by itself.
cat >"$run/inside" <<'END_INSIDE'
set -euo pipefail
run=$1
for folder in /etc/libvirt /var/lib/libvirt /var/cache/libvirt /var/log/libvirt /run; do
    mkdir -p "$folder"
    mount -t tmpfs own "$folder"
done
mkdir -p /run/libvirt
cat >/etc/libvirt/qemu.conf <<END_CONF
user = "root"
group = "root"
security_driver = "none"
namespaces = []
cgroup_controllers = []
stdio_handler = "file"
remember_owner = 0
END_CONF
printf 'auth_unix_rw = "none"\nunix_sock_dir = "/run/libvirt"\n' >/etc/libvirt/libvirtd.conf
libvirtd -f /etc/libvirt/libvirtd.conf >"$run/libvirtd.log" 2>&1 &
daemon=$!
virsh() { command virsh -q -c 'qemu+unix:///system?socket=/run/libvirt/libvirt-sock' "$@"; }
finish() {
    virsh destroy guest >/dev/null 2>&1 || true
    kill "$daemon" 2>/dev/null || true
    wait "$daemon" || true
}
trap finish EXIT
trap 'exit 143' TERM INT
until virsh uri >/dev/null 2>&1; do
    kill -0 "$daemon" 2>/dev/null || { tail -n 20 "$run/libvirtd.log" && exit 1; }
    sleep 0.1
done
# Gone with its end, since it is not defined.
virsh create "$run/domain.xml" || { tail -n 20 "$run/libvirtd.log" && exit 1; }
while virsh domstate guest >/dev/null 2>&1; do sleep 0.2; done
END_INSIDE
status=0
limited unshare --mount --propagation private bash "$run/inside" "$run" >&2 || status=$?
[ -f "$run/console" ] || : >"$run/console"
finish_run "$status"
