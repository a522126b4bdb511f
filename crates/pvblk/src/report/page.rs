//! The HTML of a report: one file that loads nothing. Whatever comes from results is text.

use anyhow::Result;
use pvblk_bench::plot::{CSS, Chart, Width, escaped};
use std::fmt::Write as _;

/// The style sheet of the page, beside that of charts.
const STYLE: &str = include_str!("report.css");
/// The digests by which the browser knows the two style sheets; a test computes them.
const STYLES: [&str; 2] = [
    "sha256-uh5JP+7snuhwh2hOK8VOldu4fCrtBXEnMcVqIDB6JR8=",
    "sha256-vak7woA5Ymqsa+P1MHUffHiVWiuXz9bsyArRbczK3Gg=",
];

/// Cells of tables and lines: text, or text that stands out.
pub enum Cell {
    Text(String),
    Bad(String),
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Cell {
        Cell::Text(text.into())
    }
}

impl Cell {
    fn html(&self) -> String {
        match self {
            Cell::Text(text) => escaped(text),
            Cell::Bad(text) => format!("<span class=\"bad\">{}</span>", escaped(text)),
        }
    }
}

/// A page that is being made.
#[derive(Default)]
pub struct Page {
    body: String,
}

impl Page {
    fn line(&mut self, html: std::fmt::Arguments<'_>) {
        // Writing to a string can't fail.
        let _ = writeln!(self.body, "{html}");
    }

    pub fn section(&mut self, title: &str) {
        self.line(format_args!("<h2>{}</h2>", escaped(title)));
    }

    pub fn part(&mut self, title: &str) {
        self.line(format_args!("<h3>{}</h3>", escaped(title)));
    }

    pub fn text(&mut self, text: &str) {
        self.line(format_args!("<p>{}</p>", escaped(text)));
    }

    pub fn quiet(&mut self, text: &str) {
        self.line(format_args!("<p class=\"quiet\">{}</p>", escaped(text)));
    }

    pub fn warning(&mut self, text: &str) {
        self.line(format_args!("<p class=\"bad\">{}</p>", escaped(text)));
    }

    /// A table of figures: the first column has names.
    pub fn table(&mut self, header: &[&str], rows: Vec<Vec<Cell>>) {
        self.rows("table", header, rows);
    }

    /// A table of words.
    pub fn words(&mut self, header: &[&str], rows: Vec<Vec<Cell>>) {
        self.rows("table class=\"words\"", header, rows);
    }

    fn rows(&mut self, tag: &str, header: &[&str], rows: Vec<Vec<Cell>>) {
        if rows.is_empty() {
            return;
        }
        let name = header.join(", ");
        self.scroll(&name);
        let cells: String = header
            .iter()
            .map(|h| format!("<th scope=\"col\">{}</th>", escaped(h)))
            .collect();
        self.line(format_args!(
            "<{tag}><thead><tr>{cells}</tr></thead><tbody>"
        ));
        for row in rows {
            let cells: String = row
                .iter()
                .map(|c| format!("<td>{}</td>", c.html()))
                .collect();
            self.line(format_args!("<tr>{cells}</tr>"));
        }
        self.line(format_args!("</tbody></table></div>"));
    }

    /// Opens a box that can be scrolled aside, also by keyboard.
    fn scroll(&mut self, name: &str) {
        let name = escaped(name);
        self.line(format_args!(
            "<div class=\"scroll\" role=\"region\" tabindex=\"0\" aria-label=\"{name}\">"
        ));
    }

    /// Text as a terminal shows it.
    pub fn terminal(&mut self, name: &str, text: &str) {
        self.scroll(name);
        self.line(format_args!("<pre>{}</pre></div>", escaped(text)));
    }

    /// A chart, once for wide windows and paper, and once for phones.
    pub fn chart(&mut self, chart: &Chart) -> Result<()> {
        let (wide, narrow) = (chart.draw(Width::Wide)?, chart.draw(Width::Narrow)?);
        self.line(format_args!(
            "<figure><div class=\"wide\">{wide}</div><div class=\"narrow\">{narrow}</div></figure>"
        ));
        Ok(())
    }

    /// A file, as a link that saves it.
    pub fn attachment(&mut self, name: &str, kind: &str, bytes: &[u8]) {
        let (name, data) = (escaped(name), base64(bytes));
        self.line(format_args!(
            "<p><a download=\"{name}\" href=\"data:{kind};base64,{data}\">{name}</a> <span class=\"quiet\">({} bytes)</span></p>",
            bytes.len()
        ));
    }

    /// The whole page.
    pub fn finish(self, title: &str, made: &str) -> String {
        let (title, made, body) = (escaped(title), escaped(made), self.body);
        let styles = STYLES.map(|digest| format!("'{digest}'")).join(" ");
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src {styles}; base-uri 'none'; form-action 'none'\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"referrer\" content=\"no-referrer\">\n\
             <title>{title}</title>\n<style>{STYLE}</style>\n<style>{CSS}</style>\n</head>\n\
             <body>\n<main>\n<h1>{title}</h1>\n<p class=\"quiet\">{made}</p>\n{body}</main>\n</body>\n</html>\n"
        )
    }
}

/// RFC 4648, with padding.
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let byte = |n: usize| u32::from(chunk.get(n).copied().unwrap_or(0));
        let group = byte(0) << 16 | byte(1) << 8 | byte(2);
        for n in 0..4 {
            out.push(match n <= chunk.len() {
                true => LETTERS[(group >> (18 - 6 * n) & 63) as usize] as char,
                false => '=',
            });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::process::{Command, Stdio};

    #[test]
    fn base64_is_rfc_4648s() {
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        assert_eq!(base64(&[0xfb, 0xff, 0xfe]), "+//+");
    }

    /// A browser takes no style sheet whose digest is another one.
    #[test]
    fn digests_are_those_of_the_style_sheets() {
        for (sheet, digest) in [STYLE, CSS].into_iter().zip(STYLES) {
            let mut sum = Command::new("sha256sum")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            sum.stdin
                .take()
                .unwrap()
                .write_all(sheet.as_bytes())
                .unwrap();
            let hex = String::from_utf8(sum.wait_with_output().unwrap().stdout).unwrap();
            let bytes: Vec<u8> = (0..32)
                .map(|n| u8::from_str_radix(&hex[2 * n..2 * n + 2], 16).unwrap())
                .collect();
            assert_eq!(format!("sha256-{}", base64(&bytes)), digest);
        }
    }

    #[test]
    fn whatever_comes_from_results_is_text() {
        let hostile = "</pre></td><script>alert(1)</script>\" onload=\"'&";
        let mut page = Page::default();
        page.section(hostile);
        page.part(hostile);
        page.text(hostile);
        page.quiet(hostile);
        page.warning(hostile);
        page.table(
            &[hostile],
            vec![vec![hostile.into(), Cell::Bad(hostile.into())]],
        );
        page.words(&[hostile], vec![vec![hostile.into()]]);
        page.terminal(hostile, hostile);
        page.attachment(hostile, "application/json", hostile.as_bytes());
        let html = page.finish(hostile, hostile);
        assert!(
            !html.contains("<script") && !html.contains("onload=\""),
            "{html}"
        );
        assert_eq!(html.matches("</td>").count(), 3);
    }
}
