//! HTML as text: everything that comes from a file goes through `escape`.

use std::fmt::Write as _;

/// Text that is safe between tags and in a quoted attribute.
pub(super) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            other => safe.push(other),
        }
    }
    safe
}

/// More rows than this scroll in a box of their own.
const TALL: usize = 24;

/// A table whose first column names its rows, and whose other columns are numbers unless their title begins with a `<`.
pub(super) struct Table {
    caption: String,
    head: String,
    body: String,
    rows: usize,
    /// Whether each column is text.
    texts: Vec<bool>,
}

fn class(is_text: bool) -> &'static str {
    if is_text { " class=\"text\"" } else { "" }
}

impl Table {
    pub(super) fn new(caption: &str, titles: &[&str]) -> Self {
        let texts: Vec<bool> = (0..titles.len()).map(|place| place == 0 || titles[place].starts_with('<')).collect();
        let cell = |(title, is_text): (&&str, &bool)| {
            format!("<th scope=\"col\"{}>{}</th>", class(*is_text), escape(title.trim_start_matches('<')))
        };
        let head = titles.iter().zip(&texts).map(cell).collect();
        Self { caption: escape(caption), head, body: String::new(), rows: 0, texts }
    }

    pub(super) fn row(&mut self, cells: &[String]) {
        self.rows += 1;
        self.body.push_str("<tr>");
        for (place, (cell, is_text)) in cells.iter().zip(&self.texts).enumerate() {
            let (begin, end) = if place == 0 { ("th scope=\"row\"", "th") } else { ("td", "td") };
            let _ = write!(self.body, "<{begin}{}>{}</{end}>", class(*is_text), escape(cell));
        }
        self.body.push_str("</tr>");
    }

    pub(super) fn end(self) -> String {
        let Self { caption, head, body, rows, .. } = self;
        let tall = if rows > TALL { " tall" } else { "" };
        format!(
            "<div class=\"scroll{tall}\" tabindex=\"0\" role=\"region\" aria-label=\"{caption}\"><table><caption>{caption}\
             </caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>\n"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_from_a_file_is_text() {
        assert_eq!(escape("<b a=\"1\" c='2'>&amp;"), "&lt;b a=&quot;1&quot; c=&#39;2&#39;&gt;&amp;amp;");
        let mut table = Table::new("a<b", &["name", "<what", "ms"]);
        table.row(&["<script>".to_owned(), "x".to_owned(), "1".to_owned()]);
        let text = table.end();
        assert!(text.contains("<caption>a&lt;b</caption>") && text.contains("&lt;script&gt;"), "{text}");
        assert!(text.contains("<td class=\"text\">x</td><td>1</td>"), "{text}");
    }
}
