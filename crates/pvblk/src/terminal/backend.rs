//! The terminal as ratatui draws on it: 16 colours, four attributes, and no question to the terminal.

use super::size;
use crossterm::cursor::{Hide, MoveTo, Show};
use crossterm::queue;
use crossterm::style::{
    Attribute, Color as Shade, Print, SetAttribute, SetBackgroundColor, SetForegroundColor,
};
use crossterm::terminal::{Clear, ClearType as What};
use ratatui_core::backend::{Backend, ClearType, WindowSize};
use ratatui_core::buffer::Cell;
use ratatui_core::layout::{Position, Size};
use ratatui_core::style::{Color, Modifier};
use std::io::{self, Write};

/// Cells that are drawn are put out at once by [`Backend::flush`].
pub struct Drawing<W: Write> {
    bytes: Vec<u8>,
    out: W,
}

impl<W: Write> Drawing<W> {
    pub fn new(out: W) -> Drawing<W> {
        Drawing {
            bytes: Vec::new(),
            out,
        }
    }

    fn style(&mut self, cell: &Cell) -> io::Result<()> {
        queue!(self.bytes, SetAttribute(Attribute::Reset))?;
        for (modifier, attribute) in [
            (Modifier::BOLD, Attribute::Bold),
            (Modifier::DIM, Attribute::Dim),
            (Modifier::UNDERLINED, Attribute::Underlined),
            (Modifier::REVERSED, Attribute::Reverse),
        ] {
            if cell.modifier.contains(modifier) {
                queue!(self.bytes, SetAttribute(attribute))?;
            }
        }
        if cell.fg != Color::Reset {
            queue!(self.bytes, SetForegroundColor(shade(cell.fg)))?;
        }
        if cell.bg != Color::Reset {
            queue!(self.bytes, SetBackgroundColor(shade(cell.bg)))?;
        }
        Ok(())
    }
}

impl<W: Write> Backend for Drawing<W> {
    type Error = io::Error;

    fn draw<'a, I>(&mut self, content: I) -> io::Result<()>
    where
        I: Iterator<Item = (u16, u16, &'a Cell)>,
    {
        let mut style = None;
        let mut next = None;
        for (x, y, cell) in content {
            if next != Some((x, y)) {
                queue!(self.bytes, MoveTo(x, y))?;
            }
            next = Some((x + 1, y));
            let of_cell = (cell.fg, cell.bg, cell.modifier);
            if style != Some(of_cell) {
                self.style(cell)?;
                style = Some(of_cell);
            }
            queue!(self.bytes, Print(cell.symbol()))?;
        }
        queue!(self.bytes, SetAttribute(Attribute::Reset))
    }

    fn hide_cursor(&mut self) -> io::Result<()> {
        queue!(self.bytes, Hide)
    }

    fn show_cursor(&mut self) -> io::Result<()> {
        queue!(self.bytes, Show)
    }

    fn get_cursor_position(&mut self) -> io::Result<Position> {
        Ok(Position::ORIGIN)
    }

    fn set_cursor_position<P: Into<Position>>(&mut self, position: P) -> io::Result<()> {
        let Position { x, y } = position.into();
        queue!(self.bytes, MoveTo(x, y))
    }

    fn clear(&mut self) -> io::Result<()> {
        self.clear_region(ClearType::All)
    }

    fn clear_region(&mut self, region: ClearType) -> io::Result<()> {
        let what = match region {
            ClearType::All => What::All,
            ClearType::AfterCursor => What::FromCursorDown,
            ClearType::BeforeCursor => What::FromCursorUp,
            ClearType::CurrentLine => What::CurrentLine,
            ClearType::UntilNewLine => What::UntilNewLine,
        };
        queue!(self.bytes, Clear(what))
    }

    fn size(&self) -> io::Result<Size> {
        let (width, height) = size();
        Ok(Size { width, height })
    }

    fn window_size(&mut self) -> io::Result<WindowSize> {
        Ok(WindowSize {
            columns_rows: self.size()?,
            pixels: Size::ZERO,
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.write_all(&self.bytes)?;
        self.bytes.clear();
        self.out.flush()
    }
}

fn shade(color: Color) -> Shade {
    match color {
        Color::Black => Shade::Black,
        Color::Red => Shade::DarkRed,
        Color::Green => Shade::DarkGreen,
        Color::Yellow => Shade::DarkYellow,
        Color::Blue => Shade::DarkBlue,
        Color::Magenta => Shade::DarkMagenta,
        Color::Cyan => Shade::DarkCyan,
        Color::Gray => Shade::Grey,
        Color::DarkGray => Shade::DarkGrey,
        Color::LightRed => Shade::Red,
        Color::LightGreen => Shade::Green,
        Color::LightYellow => Shade::Yellow,
        Color::LightBlue => Shade::Blue,
        Color::LightMagenta => Shade::Magenta,
        Color::LightCyan => Shade::Cyan,
        Color::White => Shade::White,
        _ => Shade::Reset,
    }
}
