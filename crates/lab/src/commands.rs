//! Runs the experiments that the flags ask for, and turns results into files and verdicts.

use crate::cli::{
    CheckedArgs, ChoicesArgs, CrashArgs, FioArgs, HitRatesArgs, IdleArgs, LabCommand, MdArgs,
    NbdArgs, OutputArgs, PageOrderArgs, PageOrderPart, PathArgs, ProtectionArgs, SqueezeArgs,
    SqueezePart, StripeQueueArgs, StripeQueuePart, SubmittersArgs, SweepArgs, TraceCostArgs,
    VhostArgs,
};
use crate::compare;
use anyhow::{Context, Result, bail};
use pvblk_backend::FixedChoices;
use pvblk_bench::plot::{Chart, Width};
use pvblk_lab::{
    agree, choices, crash, hit_rates, idle, instructions, md, nbd, null_nbd, page_order, path,
    queues, rings, squeeze, stripe_queue, trace_cost, verdict, vhost,
};
use serde::Serialize;
use std::path::PathBuf;
use std::time::Duration;

pub fn run(command: &LabCommand) -> Result<()> {
    writable(command.output())?;
    match command {
        LabCommand::Compare(args) => compare::run(args),
        LabCommand::Path(args) => run_path(args),
        LabCommand::Nbd(args) => run_nbd(args),
        LabCommand::Choices(args) => run_choices(args),
        LabCommand::Vhost(args) => run_vhost(args),
        LabCommand::Idle(args) => run_idle(args),
        LabCommand::Rings(args) => run_rings(args),
        LabCommand::Queues(args) => run_queues(args),
        LabCommand::StripeQueue(args) => run_stripe_queue(args),
        LabCommand::Submitters(args) => run_submitters(args),
        LabCommand::Protection(args) => run_protection(args),
        LabCommand::Squeeze(args) => run_squeeze(args),
        LabCommand::Bystander => squeeze::bystander::serve(),
        LabCommand::Md(args) => run_md(args),
        LabCommand::PageOrder(args) => run_page_order(args),
        LabCommand::HitRates(args) => run_hit_rates(args),
        LabCommand::Fio(args) => run_fio(args),
        LabCommand::Crash(args) => run_crash(args),
        LabCommand::CrashLoad(args) => crash::load::run(&crash::load::LoadOptions {
            socket: args.socket.clone(),
            journal: args.journal.clone(),
            seed: args.seed,
            export: args.export,
            volume: args.volume,
            queues: args.queues,
            ring_pages: args.ring_pages,
        }),
        LabCommand::ChoicesServer(args) => {
            let fixed = FixedChoices {
                spin: args.spin_us.map(Duration::from_micros),
                pull: args.pull,
            };
            choices::server(&args.socket, fixed)
        }
        LabCommand::BareServer(args) => path::bare_server(&args.socket, args.span),
        LabCommand::TraceSample(args) => {
            let events = pvblk_lab::trace_sample::run(&args.prefix, args.requests, args.seed)?;
            println!("{events} events");
            Ok(())
        }
        LabCommand::TraceCost(args) => run_trace_cost(args),
        LabCommand::Instructions(args) => instructions::run(args.requests, args.depth, args.every),
        LabCommand::NullNbd(args) => {
            let size = pvblk_volume::parse_size(&args.size)?;
            eprintln!("pvblk: ready");
            null_nbd::serve(&args.socket, size, args.simple)
                .with_context(|| format!("serving on {}", args.socket.display()))
        }
    }
}

/// A directory for sockets that goes away with the experiment.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Scratch> {
        Scratch::wanted(None)
    }

    /// In a folder of the user's choice, if there is one.
    fn wanted(folder: Option<&std::path::Path>) -> Result<Scratch> {
        let folder = folder.map_or_else(std::env::temp_dir, std::path::Path::to_owned);
        let path = folder.join(format!("pvblk-lab-{}", std::process::id()));
        std::fs::create_dir(&path).with_context(|| format!("making {}", path.display()))?;
        Ok(Scratch(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn progress(what: &str) {
    eprintln!("lab: {what}");
}

/// Fails before anything is measured if the results can't be written there afterwards.
fn writable(output: Option<&OutputArgs>) -> Result<()> {
    let Some(file) = output.and_then(|o| o.json.as_ref()) else {
        return Ok(());
    };
    let mut options = std::fs::OpenOptions::new();
    let opened = options.append(true).create(true).open(file);
    opened.map(drop).with_context(|| {
        format!(
            "--json {}: it can't be written; does its folder exist?",
            file.display()
        )
    })
}

/// An experiment's part of a report: the table, the charts, and the expected figures with those that were found.
#[derive(Default, Serialize)]
struct Shown {
    text: String,
    charts: Vec<Chart>,
    checks: Vec<verdict::Check>,
}

impl Shown {
    fn text(text: String) -> Shown {
        Shown {
            text,
            ..Shown::default()
        }
    }

    fn checked(text: String, checks: Vec<verdict::Check>) -> Shown {
        Shown {
            checks,
            ..Shown::text(text)
        }
    }
}

/// Writes the result if that is asked for, and prints its table.
fn save(output: &OutputArgs, result: &impl Serialize, shown: &Shown) -> Result<()> {
    println!("{}", shown.text);
    let Some(file) = &output.json else {
        return Ok(());
    };
    #[derive(Serialize)]
    struct Record<'a, T> {
        command: String,
        result: &'a T,
        report: &'a Shown,
    }
    let command: Vec<String> = std::env::args().skip(1).collect();
    let record = Record {
        command: format!("pvblk-lab {}", command.join(" ")),
        result,
        report: shown,
    };
    let text = serde_json::to_string_pretty(&record)?;
    std::fs::write(file, text + "\n").with_context(|| format!("writing {}", file.display()))?;
    // A chart that can't be drawn is an error of the experiment, not of the report. The samples are safe by now.
    let mut charts = shown.charts.iter();
    charts.try_for_each(|chart| chart.draw(Width::Wide).map(drop))
}

fn run_path(args: &PathArgs) -> Result<()> {
    let mut options = path::PathOptions {
        depths: args.depths.clone(),
        runs: args.runs,
        seconds: args.seconds,
        span: pvblk_volume::parse_size(&args.span)?,
        only_requests: args.requests,
    };
    if args.quick {
        options.runs = options.runs.min(3);
        options.seconds = options.seconds.min(0.2);
    }
    let scratch = Scratch::new()?;
    let result = path::run(&options, &scratch.0, &progress)?;
    save(&args.output, &result, &Shown::text(result.table()))
}

fn run_nbd(args: &NbdArgs) -> Result<()> {
    let options = nbd::NbdOptions {
        depths: args.depths.clone(),
        runs: args.runs,
        seconds: args.seconds,
        unpinned: args.unpinned,
    };
    let scratch = Scratch::new()?;
    let result = nbd::run(&options, &scratch.0, &progress)?;
    save(&args.output, &result, &Shown::text(result.table()))
}

fn run_choices(args: &ChoicesArgs) -> Result<()> {
    if args.runs < 3 || !(0.01..=60.0).contains(&args.seconds) {
        bail!("there must be three rounds, and --seconds from 0.01 to 60");
    }
    if args.depths.is_empty() || args.depths.iter().any(|d| !(1..=256).contains(d)) {
        bail!("--depths must be from 1 to 256");
    }
    let options = choices::ChoicesOptions {
        over: args.over,
        volumes: args.volumes.clone(),
        depths: args.depths.clone(),
        runs: args.runs,
        seconds: args.seconds,
    };
    let scratch = Scratch::new()?;
    let result = choices::run(&options, &scratch.0, &progress)?;
    let shown = Shown::checked(result.table(), result.checks());
    conclude(&args.checked, &result, &shown)
}

fn run_vhost(args: &VhostArgs) -> Result<()> {
    if args.runs == 0 || !(0.01..=60.0).contains(&args.seconds) {
        bail!("there must be rounds, and --seconds from 0.01 to 60");
    }
    if args.depths.is_empty() || args.depths.iter().any(|d| !(1..=1024).contains(d)) {
        bail!("--depths must be from 1 to 1024");
    }
    if args.queues.is_empty() || args.queues.iter().any(|q| !(1..=4).contains(q)) {
        bail!("--queues must be from 1 to 4");
    }
    if !(1..=64).contains(&args.disks) {
        bail!("--disks must be from 1 to 64");
    }
    let options = vhost::VhostOptions {
        depths: args.depths.clone(),
        queues: args.queues.clone(),
        disks: args.disks,
        runs: args.runs,
        seconds: args.seconds,
        spdk: args.spdk.clone(),
    };
    let scratch = Scratch::new()?;
    let result = vhost::run(&options, &scratch.0, &progress)?;
    let shown = Shown::checked(result.table(), result.checks());
    conclude(&args.checked, &result, &shown)
}

fn run_idle(args: &IdleArgs) -> Result<()> {
    let scratch = Scratch::new()?;
    let result = idle::run(args.disks, args.seconds, &scratch.0, &progress)?;
    save(&args.output, &result, &Shown::text(result.table()))
}

fn run_trace_cost(args: &TraceCostArgs) -> Result<()> {
    let result = trace_cost::run(
        args.requests,
        args.depth,
        args.rounds,
        args.every,
        &progress,
    )?;
    save(&args.output, &result, &Shown::text(result.text()?))
}

fn run_crash(args: &CrashArgs) -> Result<()> {
    let options = crash::CrashOptions {
        cycles: args.cycles,
        // The process id differs from run to run.
        seed: args.seed.unwrap_or_else(|| u64::from(std::process::id())),
        exports: match args.export.is_empty() {
            true => crash::Export::ALL.to_vec(),
            false => args.export.clone(),
        },
        volumes: match args.volume.is_empty() {
            true => crash::Volume::ALL.to_vec(),
            false => args.volume.clone(),
        },
        medium: args.medium.clone(),
        jobs: args.jobs,
    };
    progress(&format!("seed {}", options.seed));
    let scratch = Scratch::new()?;
    let result = crash::run(&options, &scratch.0, &progress)?;
    save(&args.output, &result, &Shown::text(result.table()))
}

/// Writes and prints the result, and compares it with the expected figures if that is asked for.
fn conclude(args: &CheckedArgs, result: &impl Serialize, shown: &Shown) -> Result<()> {
    save(&args.output, result, shown)?;
    let checks = &shown.checks;
    if !args.check || verdict::print(checks) {
        return Ok(());
    }
    let failed = checks.iter().filter(|c| !c.holds).count();
    bail!("{failed} of {} expected shapes were not seen", checks.len())
}

/// Small machines can't keep up with the modelled device and its clients.
fn slower(args: &SweepArgs) -> Result<f64> {
    let few = pvblk_sys::cpu::allowed().len() < 8;
    let slower = args.slower.unwrap_or(if few { 20.0 } else { 1.0 });
    if !(1.0..=1000.0).contains(&slower) {
        bail!("--slower must be from 1 to 1000");
    }
    Ok(slower)
}

fn run_rings(args: &SweepArgs) -> Result<()> {
    let options = rings::RingsOptions {
        slower: slower(args)?,
        runs: args.runs.unwrap_or(if args.run.quick { 3 } else { 5 }),
        seconds: args
            .seconds
            .unwrap_or(if args.run.quick { 0.25 } else { 1.0 }),
        quick: args.run.quick,
    };
    let scratch = Scratch::new()?;
    let result = rings::run(&options, &scratch.0, &progress)?;
    let shown = Shown {
        text: result.table(),
        charts: result.charts(),
        checks: result.checks(),
    };
    conclude(&args.run.checked, &result, &shown)
}

fn run_queues(args: &SweepArgs) -> Result<()> {
    let cpus = pvblk_sys::cpu::allowed().len() as u32;
    let options = queues::QueuesOptions {
        queues: cpus.clamp(2, 16),
        slower: slower(args)?,
        runs: args.runs.unwrap_or(if args.run.quick { 3 } else { 5 }),
        seconds: args
            .seconds
            .unwrap_or(if args.run.quick { 0.3 } else { 1.0 }),
        quick: args.run.quick,
    };
    let scratch = Scratch::new()?;
    let result = queues::run(&options, &scratch.0, &progress)?;
    let shown = Shown {
        text: result.table(),
        charts: result.charts(),
        checks: result.checks(),
    };
    conclude(&args.run.checked, &result, &shown)
}

fn run_stripe_queue(args: &StripeQueueArgs) -> Result<()> {
    use stripe_queue::{Part, StripeQueueOptions};
    let small = if args.run.quick { "48M" } else { "192M" };
    let bytes = pvblk_volume::parse_size(args.size.as_deref().unwrap_or(small))?;
    if !(16 << 20..=4 << 30).contains(&bytes) {
        bail!("--size must be from 16M to 4G");
    }
    let part = |part: &StripeQueuePart| match part {
        StripeQueuePart::Modelled => Part::Modelled,
        StripeQueuePart::Files => Part::Files,
        StripeQueuePart::Memory => Part::Memory,
    };
    let mut parts: Vec<Part> = args.on.iter().map(part).collect();
    if parts.is_empty() {
        parts = vec![Part::Modelled, Part::Files, Part::Memory];
    }
    let options = StripeQueueOptions {
        runs: args.runs.unwrap_or(if args.run.quick { 3 } else { 5 }),
        bytes,
        seconds: args.seconds,
        parts,
        cells: args.cells.clone(),
    };
    if options.runs == 0 || !(0.01..=600.0).contains(&options.seconds) {
        bail!("there must be rounds, and --seconds from 0.01 to 600");
    }
    let scratch = Scratch::wanted(args.dir.as_deref())?;
    let result = stripe_queue::run(&options, &scratch.0, &progress)?;
    let shown = Shown {
        text: result.table(),
        charts: result.charts(),
        checks: result.checks(),
    };
    conclude(&args.run.checked, &result, &shown)
}

fn run_submitters(args: &SubmittersArgs) -> Result<()> {
    use stripe_queue::submitters::{SubmittersOptions, run};
    let cpus = pvblk_sys::cpu::allowed().len();
    let mut threads = args.threads.clone();
    if threads.is_empty() {
        threads = (0..).map(|n| 1 << n).take_while(|n| *n <= cpus).collect();
    }
    if args.runs == 0 || !(0.01..=600.0).contains(&args.seconds) || args.depth == 0 {
        bail!("there must be rounds, requests in flight, and --seconds from 0.01 to 600");
    }
    if let Some(count) = threads.iter().find(|n| !(1..=cpus).contains(*n)) {
        bail!("--threads {count}: this machine lends 1 to {cpus} CPUs");
    }
    let options = SubmittersOptions {
        threads,
        runs: args.runs,
        seconds: args.seconds,
        depth: args.depth,
        ppl: args.ppl,
        cells: args.cells.clone(),
    };
    let result = run(&options, &progress)?;
    let shown = Shown {
        text: result.table(),
        charts: result.charts(),
        checks: result.checks(),
    };
    conclude(&args.checked, &result, &shown)
}

fn run_protection(args: &ProtectionArgs) -> Result<()> {
    use stripe_queue::protection::{ProtectionOptions, run};
    if args.runs == 0 || !(0.01..=600.0).contains(&args.seconds) {
        bail!("there must be rounds, and --seconds from 0.01 to 600");
    }
    let options = ProtectionOptions {
        runs: args.runs,
        seconds: args.seconds,
        cells: args.cells.clone(),
    };
    let result = run(&options, &progress)?;
    let shown = Shown {
        text: result.table(),
        charts: result.charts(),
        checks: result.checks(),
    };
    conclude(&args.checked, &result, &shown)
}

fn run_squeeze(args: &SqueezeArgs) -> Result<()> {
    use squeeze::{Part, SqueezeOptions};
    pvblk_sys::limits::raise_open_files();
    let part = |part: &SqueezePart| match part {
        SqueezePart::Swap => Part::Swap,
        SqueezePart::Reaction => Part::Reaction,
        SqueezePart::Overhead => Part::Overhead,
        SqueezePart::Survival => Part::Survival,
    };
    let mut parts: Vec<Part> = args.on.iter().map(part).collect();
    if parts.is_empty() {
        parts = vec![Part::Swap, Part::Reaction, Part::Overhead, Part::Survival];
    }
    let options = SqueezeOptions {
        runs: args.runs.unwrap_or(if args.run.quick { 1 } else { 3 }),
        quick: args.run.quick,
        parts,
    };
    if options.runs == 0 {
        bail!("--runs must be at least 1");
    }
    let scratch = Scratch::wanted(args.dir.as_deref())?;
    let result = squeeze::run(&options, &scratch.0, &progress)?;
    let shown = Shown {
        text: result.table()?,
        charts: result.charts(),
        checks: result.checks(),
    };
    conclude(&args.run.checked, &result, &shown)
}

fn run_md(args: &MdArgs) -> Result<()> {
    if args.runs == 0 || !(0.05..=60.0).contains(&args.seconds) {
        bail!("there must be rounds, and --seconds from 0.05 to 60");
    }
    if args.depths.is_empty() || args.depths.iter().any(|d| !(1..=256).contains(d)) {
        bail!("--depths must be from 1 to 256");
    }
    let options = md::MdOptions {
        runs: args.runs,
        seconds: args.seconds,
        depths: args.depths.clone(),
        cells: args.cells.clone(),
        uml: args.uml.clone(),
        fio: args.fio.clone(),
        md_stripes: args.md_stripes,
        span: args.span,
        stripes: args.stripes,
    };
    let scratch = Scratch::new()?;
    let result = md::run(&options, &scratch.0, &progress)?;
    let shown = Shown::checked(result.table(), result.checks());
    conclude(&args.checked, &result, &shown)
}

fn run_page_order(args: &PageOrderArgs) -> Result<()> {
    for seconds in [args.seconds, args.real_seconds] {
        if !(0.05..=60.0).contains(&seconds) {
            bail!("--seconds and --real-seconds must be from 0.05 to 60");
        }
    }
    let small = if args.run.quick { "64M" } else { "512M" };
    let bytes = pvblk_volume::parse_size(args.size.as_deref().unwrap_or(small))?;
    if !(16 << 20..=64 << 30).contains(&bytes) || !bytes.is_multiple_of(1 << 20) {
        bail!("--size must be a multiple of 1M from 16M to 64G");
    }
    let wants = |part| args.on.is_empty() || args.on.contains(&part);
    let mut result = PageOrder::default();
    if wants(PageOrderPart::Modelled) {
        let options = page_order::PageOrderOptions {
            seconds: args.seconds,
            quick: args.run.quick,
            threads: args.threads.unwrap_or(pvblk_sys::cpu::allowed().len()),
        };
        result.modelled = Some(page_order::run(&options, &progress)?);
    }
    if wants(PageOrderPart::Real) {
        let scratch = Scratch::wanted(args.dir.as_deref())?;
        let options = page_order::real::RealOptions {
            bytes,
            runs: args.runs,
            seconds: args.real_seconds,
        };
        result.real = Some(page_order::real::run(&options, &scratch.0, &progress)?);
    }
    let mut shown = Shown::default();
    if let Some(modelled) = &result.modelled {
        shown.text += &modelled.table();
        shown.charts = modelled.charts();
        shown.checks.extend(modelled.checks());
    }
    if let Some(real) = &result.real {
        shown.text += &real.table();
        shown.checks.extend(real.checks());
    }
    conclude(&args.run.checked, &result, &shown)
}

/// Both parts of the experiment, as far as they were run.
#[derive(Default, Serialize)]
struct PageOrder {
    modelled: Option<page_order::PageOrderResult>,
    real: Option<page_order::real::RealResult>,
}

fn run_hit_rates(args: &HitRatesArgs) -> Result<()> {
    let usual = if args.run.quick { 2048 } else { 16384 };
    let pages = args.pages.unwrap_or(usual);
    if !(256..=1 << 20).contains(&pages) {
        bail!("--pages must be from 256 to 1048576");
    }
    let options = hit_rates::HitRateOptions {
        pages,
        threads: args.threads.unwrap_or(pvblk_sys::cpu::allowed().len()),
        seed: args.seed,
    };
    let result = hit_rates::run(&options, &progress)?;
    let shown = Shown::checked(result.table(), result.checks());
    conclude(&args.run.checked, &result, &shown)
}

fn run_fio(args: &FioArgs) -> Result<()> {
    let options = agree::AgreeOptions {
        runs: args.runs,
        seconds: args.seconds,
    };
    let scratch = Scratch::new()?;
    let result = agree::run(&options, &scratch.0, &progress)?;
    let shown = Shown::checked(result.table()?, result.checks()?);
    conclude(&args.checked, &result, &shown)
}
