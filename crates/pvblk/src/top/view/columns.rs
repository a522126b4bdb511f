//! Tables whose columns leave when the terminal gets narrow.

use super::text::{left, right};
use ratatui_core::style::{Modifier, Style};
use ratatui_core::text::{Line, Span};

#[derive(Clone, Copy)]
pub struct Column {
    pub title: &'static str,
    pub width: usize,
    /// Numbers are on the right.
    pub number: bool,
    /// Rank among those that stay: 0 stays always, the greatest leaves first.
    pub leaves: u8,
}

pub const fn text(title: &'static str, width: usize, leaves: u8) -> Column {
    Column {
        title,
        width,
        number: false,
        leaves,
    }
}

pub const fn number(title: &'static str, width: usize, leaves: u8) -> Column {
    Column {
        title,
        width,
        number: true,
        leaves,
    }
}

/// The columns that fit `width`, with one space between two of them.
pub struct Columns {
    /// Their places in the table, and themselves.
    pub there: Vec<(usize, Column)>,
}

impl Columns {
    pub fn fit(columns: &[Column], width: usize) -> Columns {
        let mut there: Vec<(usize, Column)> = columns.iter().copied().enumerate().collect();
        while used(&there) > width {
            let last = there.iter().enumerate().max_by_key(|(_, (_, c))| c.leaves);
            match last {
                Some((at, (_, column))) if column.leaves > 0 => drop(there.remove(at)),
                _ => break,
            }
        }
        Columns { there }
    }

    /// Columns of the terminal that they take.
    pub fn width(&self) -> usize {
        used(&self.there)
    }

    /// A row; `cells` has one for each column of the table, also for those that have left.
    pub fn row(&self, cells: &[(String, Style)]) -> Line<'static> {
        let mut line = Line::default();
        for (at, column) in &self.there {
            let Some((text, style)) = cells.get(*at) else {
                continue;
            };
            if !line.spans.is_empty() {
                line.push_span(" ");
            }
            let text = match column.number {
                true => right(text, column.width),
                false => left(text, column.width),
            };
            line.push_span(Span::styled(text, *style));
        }
        line
    }

    /// The titles; that of `marked` is reversed.
    pub fn titles(&self, marked: Option<usize>) -> Line<'static> {
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let last = self.there.last().map_or(0, |(at, _)| *at);
        let mut cells = vec![(String::new(), bold); last + 1];
        for (at, column) in &self.there {
            cells[*at].0 = column.title.to_owned();
            if marked == Some(*at) {
                cells[*at].1 = bold.add_modifier(Modifier::REVERSED);
            }
        }
        self.row(&cells)
    }
}

fn used(there: &[(usize, Column)]) -> usize {
    let columns: usize = there.iter().map(|(_, c)| c.width + 1).sum();
    columns.saturating_sub(1)
}

/// A cell without a style.
pub fn cell(text: impl Into<String>) -> (String, Style) {
    (text.into(), Style::new())
}
