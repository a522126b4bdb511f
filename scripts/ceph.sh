#!/usr/bin/env bash
# A Ceph cluster of one machine for tests: a monitor and OSDs as plain processes on 127.0.0.1, without systemd. Nothing outside of its folder
# is touched. Clients need a key (cephx); that of `client.admin` is in DIR, where the configuration looks for all keys: DIR/NAME.keyring.
#
#   scripts/ceph.sh start DIR [OSDS]   makes the cluster with a pool `rbd`, prints `conf=DIR/ceph.conf` when images can be made
#   scripts/ceph.sh osd DIR N          starts OSD N again after it was killed
#   scripts/ceph.sh mon DIR            starts the monitor again after it was killed
#   scripts/ceph.sh stop DIR           ends all of its processes
#   scripts/ceph.sh wipe DIR           ends them and removes the folder
#
# The process IDs are in DIR/run/NAME.pid. PORT is the monitor's port (13300), OSD_BYTES the size of each OSD's sparse file (2 GiB), GRACE the seconds
# after which a silent OSD counts as down (20).
set -euo pipefail

PORT=${PORT:-13300} OSD_BYTES=${OSD_BYTES:-2147483648} GRACE=${GRACE:-20}
# Ceph's defaults allow RocksDB a write-ahead log of 1 GiB and four old ones kept for reuse, and put small writes into it first. A minute of 4 KiB
# writes then fills the OSD's file, and the OSD drops writes without an answer and ends.
ROCKSDB=compression=kNoCompression,max_write_buffer_number=4,min_write_buffer_number_to_merge=1,recycle_log_file_num=2,write_buffer_size=33554432
ROCKSDB=$ROCKSDB,writable_file_max_buffer_size=0,compaction_readahead_size=2097152,max_background_compactions=2,max_total_wal_size=134217728
action=${1:-} dir=${2:-}
case $action in
start | osd | mon | stop | wipe) [ -n "$dir" ] ;;
*) false ;;
esac || {
    sed -n '2,13p' "$0" >&2
    exit 2
}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
conf=$dir/ceph.conf

fail() {
    printf 'ceph: %s\n' "$*" >&2
    tail -n 5 "$dir"/log/*.out "$dir"/log/*.log >&2 2>/dev/null || true
    exit 1
}

ceph() { timeout 60 ceph -c "$conf" --connect-timeout 20 "$@"; }

# Starts a daemon in a session of its own and keeps its process ID.
daemon() {
    local name=$1
    shift
    setsid "$@" </dev/null >>"$dir/log/$name.out" 2>&1 &
    echo $! >"$dir/run/$name.pid"
}

write_conf() {
    local address="[v2:127.0.0.1:$PORT,v1:127.0.0.1:$((PORT + 1))]"
    cat >"$conf" <<END
[global]
fsid = $1
mon_host = $address
mon_initial_members = a
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_ipv6 = false
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
auth_allow_insecure_global_id_reclaim = false
keyring = $dir/\$name.keyring
log_file = $dir/log/\$name.log
log_to_stderr = false
mon_cluster_log_file = $dir/log/cluster.log
run_dir = $dir/run
admin_socket = $dir/run/\$name.\$pid.asok
pid_file =
crash_dir = $dir/crash
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_allow_pool_delete = true
paxos_propose_interval = 0.05
paxos_min_wait = 0.01
osd_heartbeat_grace = $GRACE
[mon]
keyring = $dir/mon/keyring
mon_data = $dir/mon
mon_data_avail_warn = 1
mon_data_avail_crit = 0
[osd]
keyring = $dir/osd.\$id/keyring
osd_data = $dir/osd.\$id
osd_objectstore = bluestore
osd_memory_target = 939524096
bluestore_block_size = $OSD_BYTES
bluestore_prefer_deferred_size_hdd = 0
bluestore_rocksdb_options = $ROCKSDB
bluestore_fsck_on_mount = false
[client]
log_file =
admin_socket =
END
}

start_mon() { daemon mon ceph-mon -c "$conf" -i a -f; }
start_osd() { daemon "osd.$1" ceph-osd -c "$conf" -i "$1" -f; }

start() {
    local osds=$1 id i fsid key
    [ -e "$conf" ] && fail "$conf exists: wipe it first"
    mkdir -p "$dir"/{log,run,mon,crash}
    fsid=$(cat /proc/sys/kernel/random/uuid)
    write_conf "$fsid"
    monmaptool --create --clobber --fsid "$fsid" \
        --addv a "[v2:127.0.0.1:$PORT,v1:127.0.0.1:$((PORT + 1))]" "$dir/monmap" >/dev/null || fail "no monmap"
    ceph-authtool --create-keyring "$dir/client.admin.keyring" --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *' >/dev/null
    cp "$dir/client.admin.keyring" "$dir/keys"
    ceph-authtool "$dir/keys" --gen-key -n mon. --cap mon 'allow *' >/dev/null || fail "no keys"
    ceph-mon -c "$conf" --mkfs -i a --monmap "$dir/monmap" --keyring "$dir/keys" || fail "the monitor's store can't be made"
    start_mon
    ceph mon stat >/dev/null || fail "the monitor doesn't answer"
    for ((i = 0; i < osds; i++)); do
        id=$(cat /proc/sys/kernel/random/uuid)
        mkdir -p "$dir/osd.$i"
        key=$(ceph-authtool --gen-print-key)
        printf '{"cephx_secret": "%s"}' "$key" | ceph osd new "$id" "$i" -i - >/dev/null || fail "the monitor takes no OSD"
        ceph-authtool --create-keyring "$dir/osd.$i/keyring" --name "osd.$i" --add-key "$key" >/dev/null
        ceph-osd -c "$conf" -i "$i" --mkfs --osd-uuid "$id" >>"$dir/log/osd.$i.out" 2>&1 || fail "the OSD's store can't be made"
        start_osd "$i"
    done
    for ((i = 0; ; i++)); do
        ceph osd stat -f json 2>/dev/null | grep -q "\"num_up_osds\":$osds," && break
        ((i < 200)) || fail "the OSDs don't come up"
        sleep 0.2
    done
    ceph osd pool create rbd 8 >/dev/null 2>&1 || fail "the pool can't be made"
    timeout 120 rbd -c "$conf" pool init rbd || fail "the pool can't be used for images"
    echo "conf=$conf"
}

stop() {
    local file pid i
    for file in "$dir"/run/osd.*.pid "$dir"/run/mon.pid; do
        [ -f "$file" ] || continue
        pid=$(cat "$file")
        kill -CONT "$pid" 2>/dev/null || true
        kill "$pid" 2>/dev/null || true
        for ((i = 0; i < 50; i++)); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -9 "$pid" 2>/dev/null || true
        rm -f "$file"
    done
}

# Waits for the end of a daemon that was killed: until then it has the lock of its store, and the next one would end at once.
ended() {
    local pid state i
    pid=$(cat "$dir/run/$1.pid" 2>/dev/null) || return 0
    for ((i = 0; i < 600; i++)); do
        state=$(sed -n 's/^State:\s*\(.\).*/\1/p' "/proc/$pid/status" 2>/dev/null) || return 0
        # The first thread of a killed process is a zombie while others still have its files.
        case $state in
        '') return 0 ;;
        Z) (($(ls "/proc/$pid/task" 2>/dev/null | wc -l) > 1)) || return 0 ;;
        esac
        sleep 0.1
    done
    fail "$1, process $pid, was killed and doesn't end"
}

case $action in
start) start "${3:-1}" ;;
osd)
    ended "osd.${3:?the number of the OSD}"
    start_osd "$3"
    ;;
mon)
    ended mon
    start_mon
    ;;
stop) stop ;;
wipe)
    stop
    rm -rf "$dir"
    ;;
esac
