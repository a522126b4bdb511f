//! Documents that are run: the commands in a page, in the order in which they stand, and what they print.

pub mod page;
pub mod reference;
pub mod session;
pub mod specs;
