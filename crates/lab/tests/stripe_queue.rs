//! The gain of the stripe queue on modelled disks: the time is virtual, so nothing depends on the machine.

use pvblk_lab::stripe_queue::{Part, StripeQueueOptions, run};

#[test]
fn streams_write_whole_stripes_and_reads_are_as_fast_as_before() {
    let options = |cells: &str| StripeQueueOptions {
        runs: 3,
        bytes: 32 << 20,
        seconds: 0.1,
        parts: vec![Part::Modelled],
        cells: Some(cells.into()),
    };
    let dir = std::env::temp_dir();
    let cells = ["sequential writes, 4 KiB, 1", "reads, 4 KiB, 4"];
    for cells in cells {
        let result = run(&options(cells), &dir, &|_| ()).expect("it runs");
        assert!(!result.modelled.is_empty());
        for check in result.checks() {
            assert!(check.holds, "{}: {}", check.expected, check.figure);
        }
        for point in result.modelled.iter().filter(|p| p.cell.phase.writes()) {
            // The direct path reads the blocks that the queue doesn't.
            assert!(point.direct[0].prereads_per_mib > 0.5, "{point:?}");
            let gain = point.queue[0].mb_per_second / point.direct[0].mb_per_second;
            assert!(gain > 1.1, "{gain}");
        }
    }
}
