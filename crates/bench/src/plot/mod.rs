//! Charts as SVG, for results and documents.
//!
//! Labels never overlap or leave the picture, whichever font the viewer has: widths are estimates on the safe
//! side. Colour-blind people can tell the colours apart (they are Okabe and Ito's), and series also have
//! markers. The background is white on any page.

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

/// An axis of a chart.
#[derive(Clone, Copy, Debug)]
pub struct Axis<'a> {
    /// Name of the axis, without a unit.
    pub label: &'a str,
    /// Unit of its ticks' labels.
    pub unit: Unit,
}
