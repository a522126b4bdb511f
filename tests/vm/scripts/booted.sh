#!/bin/bash
# In a Debian that systemd has booted: the package is installed, serves, is upgraded under load, stopped and purged. /run/vm/add has pvblk.deb and
# next.deb, the same with a higher version. Each step ends with a line `step NAME: N s`; the first one that fails ends the script.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
add=/run/vm/add
trap 'line=$LINENO; journalctl --no-pager -o cat -u pvblk -n 40 || true; echo "failed in line $line: $BASH_COMMAND"' ERR

begin=$(date +%s)
done_with() {
    printf 'step %s: %d s\n' "$1" $(($(date +%s) - begin))
    begin=$(date +%s)
}
fail() {
    printf 'failed: %s\n' "$*"
    journalctl --no-pager -o cat -u pvblk -n 40 || true
    exit 1
}
# Waits until a command succeeds; the machine's time limit is the bound.
wait_for() { until "$@" >/dev/null 2>&1; do sleep 0.2; done; }
# True if the service's journal has a line. (A pipe would fail if its reader ended first.)
logged() {
    journalctl --no-pager -u pvblk "${@:2}" >/tmp/journal
    grep -q "$1" /tmp/journal
}
property() { systemctl show --value -p "$2" "$1"; }
is_new_pid() { [ "$(property pvblk MainPID)" != "$1" ] && systemctl -q is-active pvblk; }
# Paths of all files, less what apt, dpkg, logs and systemd keep for themselves.
files() {
    find / -xdev -path /var/lib/dpkg -prune -o -path /var/lib/apt -prune -o -path /var/cache -prune -o -path /var/log -prune -o -path /tmp -prune -o \
        -path /out -prune -o -path /root -prune -o -print | sort
}
groupadd vms
useradd -G vms member
useradd stranger
# Arrays, since a function in the background would be a process of its own before the command's.
member=(setpriv --reuid member --regid member --init-groups)
stranger=(setpriv --reuid stranger --regid stranger --init-groups)
files >/tmp/before
nbd='nbd+unix:///vm1?socket=/run/pvblk/nbd.sock'

# --- The package is installed and its service runs; it said itself that it is ready, or else its start would still wait.
apt-get -q -y -o Dpkg::Use-Pty=0 install "$add/pvblk.deb" >/tmp/dpkg 2>&1 || fail "$(cat /tmp/dpkg)"
systemctl -q is-active pvblk && systemctl -q is-enabled pvblk
[ "$(property pvblk Type)" = notify ]
[ "$(pvblk disk list --json | tr -d ' \n')" = '{"disks":[]}' ] || fail "$(pvblk disk list --json)"
wait_for logged '^pvblk: ready$' -o cat
done_with install

# --- Disks by configuration, at sockets of a group.
cat >>/etc/pvblk/pvblk.toml <<'END'
nbd = ["unix:/run/pvblk/nbd.sock,socket-group=vms"]
local = "unix:/run/pvblk/rings.sock,socket-group=vms"
[disk.vm1]
volume = "file:/srv/pvblk/vm1.img,size=64M"
vhost_user = "unix:/run/pvblk/vm1.sock,socket-group=vms"
limit = "iops=200"
[disk.vm2]
volume = "cache:16M,dirty-expire=7200s:file:/srv/pvblk/vm2.img,size=64M"
END
systemctl reload pvblk
wait_for logged 'reload: ' -o cat
logged 'reload: 2 disks added, 0 removed, 0 changed, 0 unchanged$' -o cat || fail 'the reload'
systemctl status --no-pager pvblk >/tmp/status
grep -q 'active (running)' /tmp/status
done_with configure

# --- The journal has the lines with their fields.
journalctl --no-pager -o json -u pvblk SYSLOG_IDENTIFIER=pvblk PRIORITY=6 >/tmp/journal
grep '"MESSAGE":"reload: 2 disks added' /tmp/journal >/tmp/entry
grep -q '"PVBLK_MODULE":"' /tmp/entry && grep -q '"_SYSTEMD_UNIT":"pvblk.service"' /tmp/entry
done_with journal

# --- Members of the group attach by all three ways; others don't.
for target in "$nbd" vhost-user:unix:/run/pvblk/vm1.sock rings:unix:/run/pvblk/rings.sock,disk=vm1; do
    "${member[@]}" pvblk bench --target "$target" --rw randrw --iodepth 8 --size 8m --option verify=crc32c --runtime 1s >/tmp/bench 2>&1 || fail "$(cat /tmp/bench)"
    if "${stranger[@]}" pvblk bench --target "$target" --rw randread --runtime 1s >/tmp/bench 2>&1; then fail "a stranger attached at $target"; fi
    grep -q 'Permission denied' /tmp/bench || fail "$(cat /tmp/bench)"
done
"${member[@]}" nbdinfo --size "$nbd" | grep -qx 67108864
if "${stranger[@]}" nbdinfo --size "$nbd" 2>/tmp/refused; then fail 'a stranger attached by NBD'; fi
grep -q 'Permission denied' /tmp/refused
done_with groups

# --- An upgrade while clients have requests in flight.
server=$(property pvblk MainPID)
# The limit leaves the emulated CPUs to the upgrade, and keeps requests of both clients waiting.
"${member[@]}" pvblk bench --target "$nbd" --rw randrw --iodepth 8 --size 16m --option verify=crc32c --runtime 3600s >/tmp/nbd 2>&1 &
nbd_client=$!
"${member[@]}" pvblk bench --target vhost-user:unix:/run/pvblk/vm1.sock --rw randrw --iodepth 8 --size 32m --option offset=32m --option verify=crc32c --runtime 3600s >/tmp/vhost 2>&1 &
vhost_client=$!
# Whether each of the two has requests in flight.
both_work() {
    pvblk stat --json vm1 >/tmp/stat
    grep -Eq '"name":"disk vm1, vhost-user front end [0-9]+","in_flight":[1-9]' /tmp/stat && grep -Eq '"name":"nbd [^,]*","in_flight":[1-9]' /tmp/stat
}
wait_for both_work
dpkg --force-confold -i "$add/next.deb" >/tmp/dpkg 2>&1 || fail "$(cat /tmp/dpkg)"
dpkg-query -W -f '${Version}\n' pvblk | grep -qx 99
[ "$(property pvblk MainPID)" = "$server" ] || fail 'the upgrade restarted the server'
[[ $(readlink "/proc/$server/exe") == *'(deleted)' ]] || fail 'the program was not replaced'
# The new program asks the old server.
wait_for both_work
kill -TERM "$nbd_client" "$vhost_client"
wait "$nbd_client" || fail "$(cat /tmp/nbd)"
wait "$vhost_client" || fail "$(cat /tmp/vhost)"
grep -q socket-group=vms /etc/pvblk/pvblk.toml
tail -n 3 /tmp/nbd /tmp/vhost
done_with upgrade

# --- The watchdog: the process that serves is stopped while its parent, which systemd knows, is well.
mkdir -p /etc/systemd/system/pvblk.service.d
printf '[Service]\nWatchdogSec=15\n' >/etc/systemd/system/pvblk.service.d/watchdog.conf
systemctl daemon-reload
systemctl restart pvblk
[[ $(readlink "/proc/$(property pvblk MainPID)/exe") == /usr/bin/pvblk ]] || fail 'the restart ran another program'
# Again if the watchdog was quicker, on a machine where nothing moves for so long.
stop_child() {
    server=$(property pvblk MainPID)
    child=$(tr -d ' ' <"/proc/$server/task/$server/children")
    [ "$(stat -c %U "/proc/$child")" = pvblk ] && kill -STOP "$child"
}
wait_for stop_child
wait_for is_new_pid "$server"
logged 'Watchdog timeout' -o cat || fail 'it was not the watchdog'
[ ! -d "/proc/$child" ] || fail 'the stopped process is still there'
[ "$(property pvblk NRestarts)" -ge 1 ]
rm -r /etc/systemd/system/pvblk.service.d
systemctl daemon-reload
systemctl restart pvblk
"${member[@]}" nbdinfo --size "$nbd" | grep -qx 67108864
done_with watchdog

# --- Rights, as the system's manager sees them.
level() {
    systemd-analyze security --no-pager "$1" >/tmp/security || true
    sed -n 's/.*exposure level for .*: \([0-9.]*\) .*/\1/p' /tmp/security
}
cat >/etc/pvblk/red.toml <<'END'
nbd = ["unix:/run/pvblk-red/nbd.sock"]
[disk.vm3]
volume = "file:vm3.img,size=16M"
END
systemctl start pvblk@red
nbdinfo --size 'nbd+unix:///vm3?socket=/run/pvblk-red/nbd.sock' | grep -qx 16777216
for one in 'pvblk.service 2.0' 'pvblk@red.service 1.0'; do
    read -r unit most <<<"$one"
    found=$(level "$unit")
    echo "exposure of $unit: $found"
    awk -v found="$found" -v most="$most" 'BEGIN { exit !(found != "" && found <= most) }' || fail "$unit: $found, expected at most $most: $(cat /tmp/security)"
done
systemctl stop pvblk@red
rm -r /etc/pvblk/red.toml /var/lib/private/pvblk-red /var/lib/pvblk-red
done_with security

# --- A stop answers what is in flight and flushes: data are in the server's memory before, and in the image after.
pattern() { head -c 1M /dev/zero | tr '\0' "$1"; }
written() { cmp -s -n 1M /tmp/pattern /srv/pvblk/vm2.img; }
unflushed() {
    pattern "$1" >/tmp/pattern
    nbdcopy /tmp/pattern 'nbd+unix:///vm2?socket=/run/pvblk/nbd.sock'
    if written; then fail 'the cache holds nothing back, so the stop proves nothing'; fi
}
unflushed s
systemctl stop pvblk
[ "$(property pvblk Result) $(property pvblk ExecMainStatus)" = 'success 0' ] || fail "$(systemctl status --no-pager pvblk)"
written || fail 'the stop lost a write'
[ ! -e /run/pvblk ] || fail "$(ls /run/pvblk)"
done_with stop

# --- A purge stops the server in the same way, and leaves images and nothing else.
systemctl start pvblk
unflushed p
dpkg --purge pvblk >/tmp/dpkg 2>&1 || fail "$(cat /tmp/dpkg)"
written || fail 'the purge lost a write'
systemctl daemon-reload
[ "$(property pvblk LoadState)" = not-found ]
if ls -l /proc/[0-9]*/exe 2>/dev/null | grep pvblk; then fail 'a server runs on'; fi
files >/tmp/after
comm -13 /tmp/before /tmp/after >/tmp/left
printf '/srv/pvblk\n/srv/pvblk/vm1.img\n/srv/pvblk/vm2.img\n' | diff - /tmp/left || fail 'the purge left something else than images'
[ -z "$(systemctl --failed --no-legend --plain)" ] || fail "$(systemctl --failed)"
done_with purge
