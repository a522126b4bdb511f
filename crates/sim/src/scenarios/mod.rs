mod cache;
mod raid;
mod rings;
mod squeeze;
mod stop;

use crate::{Scenario, run};

pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "rings",
        about: "front ends and back ends over rings, either of which dies, over a disk that loses its cache",
        bugs: rings::bugs,
        run: run::<rings::Rings>,
    },
    Scenario {
        name: "raid",
        about: "a RAID-5 array whose power is cut, with members that fail, stay away and are rebuilt",
        bugs: raid::bugs,
        run: run::<raid::Array>,
    },
    Scenario {
        name: "cache",
        about: "a page cache whose power is cut, over a disk that fails and in memory that is short",
        bugs: cache::bugs,
        run: run::<cache::Cached>,
    },
    Scenario {
        name: "squeeze",
        about: "buffer pools whose memory is taken away, and connections that break",
        bugs: squeeze::bugs,
        run: run::<squeeze::Squeezed>,
    },
    Scenario {
        name: "stop",
        about: "an orderly stop of several disks, some of which hang or fail",
        bugs: stop::bugs,
        run: run::<stop::Stopped>,
    },
];
