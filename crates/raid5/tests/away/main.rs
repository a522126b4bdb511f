//! Members that stall, are kicked for it, and come back: what is waited for, what is written again, and what a late answer may change.

mod array;
mod restarts;
mod returns;
mod stalls;

#[path = "../support/gate.rs"]
mod gate;
#[path = "../support/started.rs"]
mod started;
