//! Charts as SVG, for results and documents.
//!
//! Labels never overlap or leave the picture, whichever font the viewer has: widths are estimates on the safe side. Colours are told apart by people who see
//! fewer of them (Okabe and Ito's), and series also by their markers. The background is white, whatever is around.

mod bars;
mod canvas;
mod hops;
mod lines;
mod text;
mod ticks;

pub use bars::{Bar, bar_chart};
pub use hops::hop_chart;
pub use lines::{Point, Scale, line_chart};
pub use ticks::Unit;

/// What an axis shows.
#[derive(Clone, Copy, Debug)]
pub struct Axis<'a> {
    /// Its name, without a unit.
    pub label: &'a str,
    /// How its ticks are labelled.
    pub unit: Unit,
}
