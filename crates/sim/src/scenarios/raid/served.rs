//! The array of either core, and its background work, as the simulation drives them.

use super::array::Array;
use super::boot::Turns;
use crate::ScenarioState;
use crate::bugs::Bug;
use crate::log::Log;
use pvblk_block::{BlockDevice, Error, Reclaim};
use pvblk_raid5::{
    ArrayOptions, Assembly, BackgroundWork, CoreKind, Idle, ManagedArray, Raid5, StripeArray,
    StripeBackground,
};
use std::sync::Arc;
use std::time::Duration;

/// An array that serves.
pub trait Served: ManagedArray + BlockDevice + Reclaim {
    /// The place without a member, also if only superblocks leave it out so far.
    fn failed(&self) -> Option<usize>;
    fn rebuilding(&self) -> Option<usize>;
    fn in_sync_sectors(&self) -> Option<u64>;
    fn is_kicking(&self) -> bool;
    fn stop(&self, idle: &mut Idle<'_>) -> Result<(), Error>;
    fn check_queues(&self) -> Result<(), String>;
}

impl Served for Raid5 {
    fn failed(&self) -> Option<usize> {
        Raid5::failed(self)
    }
    fn rebuilding(&self) -> Option<usize> {
        Raid5::rebuilding(self)
    }
    fn in_sync_sectors(&self) -> Option<u64> {
        Raid5::in_sync_sectors(self)
    }
    fn is_kicking(&self) -> bool {
        Raid5::is_kicking(self)
    }
    fn stop(&self, idle: &mut Idle<'_>) -> Result<(), Error> {
        Raid5::stop(self, idle)
    }
    fn check_queues(&self) -> Result<(), String> {
        Raid5::check_queues(self)
    }
}

impl Served for StripeArray {
    fn failed(&self) -> Option<usize> {
        StripeArray::failed(self).or(self.left_out())
    }
    fn rebuilding(&self) -> Option<usize> {
        StripeArray::rebuilding(self)
    }
    fn in_sync_sectors(&self) -> Option<u64> {
        StripeArray::in_sync_sectors(self)
    }
    fn is_kicking(&self) -> bool {
        StripeArray::is_kicking(self)
    }
    fn stop(&self, idle: &mut Idle<'_>) -> Result<(), Error> {
        StripeArray::stop(self, idle)
    }
    fn check_queues(&self) -> Result<(), String> {
        Ok(())
    }
}

/// The background work of an array.
pub enum Keeper {
    Lock(Box<BackgroundWork>),
    Words(Box<StripeBackground>),
}

impl Keeper {
    /// Does what is due at this time. `turns` move while it waits, which takes time; their end is the end of the array.
    pub fn step(&mut self, now: Duration, log: &Log, turns: &mut Turns<'_>) {
        match self {
            Keeper::Lock(background) => {
                background.step(now);
            }
            Keeper::Words(background) => {
                let mut idle = || {
                    log.clock.advance(Duration::from_millis(10));
                    turns.turn()
                };
                background.work_with(&|| log.elapsed(), &mut idle);
            }
        }
    }

    pub fn is_busy(&self) -> bool {
        match self {
            Keeper::Lock(background) => background.is_busy(),
            Keeper::Words(background) => background.is_busy(),
        }
    }

    /// The device that came back, and is to be added.
    pub fn take_whole(&mut self) -> Option<(String, Arc<dyn BlockDevice>)> {
        match self {
            Keeper::Lock(background) => background.take_whole(),
            Keeper::Words(background) => background.take_whole(),
        }
    }
}

/// Starts an array.
pub fn start(
    core: CoreKind,
    assembly: Assembly,
    options: &ArrayOptions,
) -> Result<(Arc<dyn Served>, Keeper), Error> {
    Ok(match core {
        CoreKind::Lock => {
            let array = Raid5::start(assembly, options)?;
            let background = BackgroundWork::new(&array)?;
            (array, Keeper::Lock(Box::new(background)))
        }
        CoreKind::Words => {
            let array = StripeArray::start(assembly, options)?;
            let background = StripeBackground::new(&array);
            (array, Keeper::Words(Box::new(background)))
        }
    })
}

/// The scenario with the core without a lock.
pub struct WordsArray(Array);

impl ScenarioState for WordsArray {
    fn new(seed: u64, bug: Option<Bug>, log: Log) -> Result<WordsArray, String> {
        Array::new(seed, bug, log, CoreKind::Words).map(WordsArray)
    }

    fn drive(&mut self) -> Result<(), String> {
        self.0.drive()
    }

    fn log(&mut self) -> &mut Log {
        self.0.log()
    }
}
