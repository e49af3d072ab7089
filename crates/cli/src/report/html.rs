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

/// A table whose first column names its rows, and whose other columns are numbers unless their title begins with a `<`.
pub(super) struct Table {
    text: String,
    /// Whether each column is text.
    texts: Vec<bool>,
}

impl Table {
    pub(super) fn new(caption: &str, titles: &[&str]) -> Self {
        let mut text = format!(
            "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{0}\"><table><caption>{0}</caption><thead><tr>",
            escape(caption)
        );
        let mut texts = Vec::new();
        for (place, title) in titles.iter().enumerate() {
            let is_text = place == 0 || title.starts_with('<');
            let class = if is_text { " class=\"text\"" } else { "" };
            let _ = write!(text, "<th scope=\"col\"{class}>{}</th>", escape(title.trim_start_matches('<')));
            texts.push(is_text);
        }
        text.push_str("</tr></thead><tbody>");
        Self { text, texts }
    }

    pub(super) fn row(&mut self, cells: &[String]) {
        self.text.push_str("<tr>");
        for (place, cell) in cells.iter().enumerate() {
            let class = if self.texts.get(place) == Some(&true) { " class=\"text\"" } else { "" };
            let _ = match place {
                0 => write!(self.text, "<th scope=\"row\"{class}>{}</th>", escape(cell)),
                _ => write!(self.text, "<td{class}>{}</td>", escape(cell)),
            };
        }
        self.text.push_str("</tr>");
    }

    pub(super) fn end(mut self) -> String {
        self.text.push_str("</tbody></table></div>\n");
        self.text
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
