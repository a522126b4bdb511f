//! Parts that the tests of this folder share; each uses some.
#![allow(dead_code)]

pub mod device;
pub mod instantly;
pub mod log;
pub mod peer;
pub mod source;
