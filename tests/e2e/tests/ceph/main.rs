//! Images of a real Ceph cluster, served: data, kills of the cluster's daemons, one writer. `PVBLK_E2E_FULL=1` (`make test-ceph`) runs longer.

mod data;
mod exit;
mod many;
mod one_writer;
mod pauses;
mod planted;
mod sandboxed;
mod served;
mod sizes;
mod steals;

use pvblk_e2e::ceph::Cluster;
use pvblk_e2e::daemon::pvblk;
use pvblk_e2e::nbd::Command;
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::run;
use pvblk_e2e::{Stop, run_all};
use served::Served;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// One cluster for all tests, which are run one after another.
static CLUSTER: Mutex<Option<Cluster>> = Mutex::new(None);

fn main() -> ExitCode {
    let code = run_all(&[
        ("data_goes_in_and_comes_back", data::data),
        ("every_way_in_verifies", data::every_way),
        ("kills_of_the_cluster_are_pauses", pauses::kills),
        ("a_stopped_osd_is_a_pause", pauses::stopped),
        ("snapshots_and_clones", data::snapshots),
        ("holes_are_told", data::holes),
        ("a_resize_is_seen", sizes::resize),
        ("a_full_cluster_is_no_space", data::full_cluster),
        ("there_is_one_writer", one_writer::one_writer),
        ("an_end_in_order_leaves_no_lock", one_writer::given_back),
        ("a_crash_leaves_the_lock_for_the_next", one_writer::crashed),
        (
            "a_server_that_stood_still_writes_nothing",
            one_writer::replaced,
        ),
        (
            "a_lock_broken_without_a_block_is_noticed",
            one_writer::broken_without_a_block,
        ),
        ("a_stolen_lock_stops_the_disk_and_no_other", steals::steals),
        ("a_slow_thief_gets_the_lock", steals::slow_thief),
        ("a_disk_may_wait_instead", steals::waits),
        ("mistakes_are_one_line", mistakes),
        ("an_exit_runs_no_destructor_below_threads", exit::exit),
        ("an_image_is_served_in_a_sandbox", sandboxed::served),
        (
            "images_are_opened_that_the_configuration_names",
            sandboxed::named,
        ),
        (
            "a_server_ends_with_the_process_of_its_images",
            sandboxed::ended,
        ),
        ("a_hundred_images_share_a_connection", many::hundred),
        ("planted_bugs_are_found", planted::found),
    ]);
    let cluster = CLUSTER
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .take();
    drop(cluster);
    code
}

fn on_cluster(test: impl FnOnce(&Cluster) -> Result<(), Stop>) -> Result<(), Stop> {
    let mut cluster = CLUSTER.lock().unwrap_or_else(PoisonError::into_inner);
    if cluster.is_none() {
        *cluster = Some(Cluster::start()?);
    }
    match &*cluster {
        Some(cluster) => test(cluster).map_err(|stop| match stop {
            Stop::Fail(why) => Stop::Fail(format!("{why}\n{}", cluster.health().trim_end())),
            skip => skip,
        }),
        None => Stop::fail("there is no cluster"),
    }
}

fn mistakes() -> Result<(), Stop> {
    on_cluster(|cluster| {
        cluster.rbd(&[
            "create",
            "--size=16M",
            "--image-feature=layering",
            "rbd/plain",
        ])?;
        let conf = cluster.conf().display().to_string();
        for (spec, wanted) in [
            (
                cluster.spec("nothing", ""),
                "opening the image: No such file",
            ),
            (
                format!("rbd:nopool/a,conf={conf}"),
                "opening the pool: No such file",
            ),
            (
                "rbd:rbd/a,conf=/nonexistent".to_owned(),
                "name the cluster's configuration file with conf=PATH",
            ),
            (
                cluster.spec("plain", ""),
                "rbd feature enable rbd/plain exclusive-lock",
            ),
            (
                format!("rbd:rbd/plain,conf={conf},id=nobody"),
                "name them with id= and in the configuration file",
            ),
        ] {
            let disk = format!("a={spec}");
            let said = run(
                pvblk(["serve", "--disk", &disk, "--nbd=unix:none"])?,
                Duration::from_secs(120),
            )?;
            let lines = said.stderr.lines().filter(|l| l.contains(wanted)).count();
            let failed = said.status.and_then(|s| s.code()) == Some(1);
            check(failed && lines == 1, || format!("{spec}: {said:?}"))?;
        }
        let mut served = Served::one(cluster, "plain", ",nolock")?;
        let mut connection = served.connect("plain")?;
        connection.send(Command::Write, 1, 0, &[7; 4096])?;
        let reply = connection.receive()?;
        check(reply.is_some_and(|r| r.error == 0), || format!("{reply:?}"))?;
        drop(connection);
        served.daemon.stop()
    })
}
