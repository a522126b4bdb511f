//! The events that the server told, the newest first.

use super::Page;
use super::text::wrapped;
use crate::terminal::shown;
use crate::top::model::Model;
use crate::top::ui::Ui;
use ratatui_core::style::{Color, Style};
use ratatui_core::text::Line;

pub fn page(model: &Model, ui: &Ui, width: usize) -> Page {
    let mut page = Page::default();
    // The newest come first: the page begins with what just happened.
    for event in model.events.iter().rev() {
        if ui.disk.is_some() && event.disk != ui.disk {
            continue;
        }
        let text = event.to_string();
        if !ui.passes(&text) {
            continue;
        }
        let style = match event.severity.as_str() {
            "error" => Style::new().fg(Color::Red),
            "warning" => Style::new().fg(Color::Yellow),
            _ => Style::new(),
        };
        for (n, line) in wrapped(&shown(&text), width.saturating_sub(2))
            .into_iter()
            .enumerate()
        {
            let indent = if n == 0 { "" } else { "  " };
            page.lines
                .push(Line::styled(format!("{indent}{line}"), style));
        }
    }
    if page.lines.is_empty() {
        page.lines.push(Line::raw("no events"));
    }
    page
}
