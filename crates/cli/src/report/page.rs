//! The page: a template, its style and its scripts, all inside of the program, with the figures and the spans of a trace.
//! Nothing is fetched: the policy in the page allows the one style and the one script that are in it, and no connection.

use sha2::{Digest, Sha256};

use super::html::escape;
use super::sections;
use super::timeline::Timeline;
use super::{Report, trace::Rank};
use crate::tables::count;

const TEMPLATE: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/style.css");
const SCRIPT: &str = concat!(
    "\"use strict\";\n(() => {\n",
    include_str!("page/data.js"),
    include_str!("page/view.js"),
    include_str!("page/draw.js"),
    include_str!("page/input.js"),
    include_str!("page/page.js"),
    "})();\n"
);

/// The sections, by their id, with their titles.
const SECTIONS: [(&str, &str); 8] = [
    ("summary", "Summary"),
    ("timeline", "Timeline"),
    ("wire", "Wire"),
    ("exposed", "Exposed"),
    ("steps", "Steps"),
    ("memory", "Memory"),
    ("plan", "Activations"),
    ("settings", "Settings"),
];

/// The page about a trace. `name` is that of its file, without folders.
pub(super) fn page(report: &Report, name: &str) -> String {
    let data: Vec<Timeline<'_>> =
        report.ranks().map(|(rank, computed)| Timeline::new(rank, &computed.figures)).collect();
    // Inside of a script only `<` could end it.
    let data = serde_json::to_string(&data).unwrap_or_default().replace('<', "\\u003c");
    let contents = SECTIONS.map(|(id, title)| format!("<li><a href=\"#{id}\">{title}</a></li>")).concat();
    fill(|place| match place {
        "policy" => policy(),
        "title" => format!("forebay report: {}", escape(name)),
        "style" => STYLE.to_owned(),
        "script" => SCRIPT.to_owned(),
        "data" => data.clone(),
        "contents" => contents.clone(),
        "about" => escape(&about(report)),
        "footer" => format!("Made by forebay {} from {}. This page loads nothing.", forebay::VERSION, escape(name)),
        "choice" => choice(report),
        "notes" => sections::notes(report),
        "legend" => sections::legend(report),
        "summary" => sections::summary(report),
        "wire" => sections::wire(report, name),
        "exposed" => sections::exposed(report),
        "steps" => sections::steps(report),
        "memory" => sections::memory(report),
        "plan" => sections::plan(report),
        "settings" => sections::settings(report),
        other => format!("no part {other}"),
    })
}

/// The template with each `{{place}}` replaced, in one pass: what is put in is not looked at again.
fn fill(part: impl Fn(&str) -> String) -> String {
    let mut text = String::new();
    let mut rest = TEMPLATE;
    while let Some((before, after)) = rest.split_once("{{") {
        let Some((place, after)) = after.split_once("}}") else { break };
        text.push_str(before);
        text.push_str(&part(place));
        rest = after;
    }
    text + rest
}

/// What the page may do: run the script and use the style with these sums, and nothing else.
fn policy() -> String {
    format!(
        "default-src 'none'; script-src '{}'; style-src '{}'; img-src data:; base-uri 'none'; form-action 'none'",
        sum(SCRIPT),
        sum(STYLE)
    )
}

/// A SHA-256 sum as policies write it.
fn sum(text: &str) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut sum = Sha256::digest(text.as_bytes()).to_vec();
    // 32 bytes and one more are 44 digits, the last of which stands for no byte.
    sum.push(0);
    let digits = sum.chunks(3).flat_map(|three| {
        let bits = three.iter().fold(0usize, |bits, byte| bits << 8 | usize::from(*byte));
        [18, 12, 6, 0].map(|shift| char::from(DIGITS[bits >> shift & 63]))
    });
    format!("sha256-{}=", digits.take(43).collect::<String>())
}

/// The machine, the versions, the time.
fn about(report: &Report) -> String {
    let text = |rank: &Rank, name: &str| {
        let value = rank.about.machine.get(name)?;
        Some(value.as_str().map_or_else(|| value.to_string(), str::to_owned))
    };
    let Some((rank, computed)) = report.ranks().next() else { return String::new() };
    let mut parts: Vec<String> = ["name", "device"].iter().filter_map(|name| text(rank, name)).collect();
    parts.dedup();
    parts.extend(text(rank, "torch").map(|version| format!("torch {version}")));
    parts.extend(text(rank, "python").map(|version| format!("Python {version}")));
    parts.push(format!("recorded by forebay {}", rank.about.version));
    parts.push(count(report.computed.len(), "rank"));
    parts.push(count(report.computed.iter().map(|one| one.figures.spans).sum(), "span"));
    parts.push(super::seconds(computed.figures.seconds));
    parts.join(", ")
}

/// The choice of a rank, where there are several.
fn choice(report: &Report) -> String {
    if report.computed.len() < 2 {
        return String::new();
    }
    let option = |rank: u64| format!("<option value=\"{rank}\">rank {rank}</option>");
    let options: String = report.computed.iter().map(|one| option(one.figures.rank)).collect();
    format!(
        "<p><label for=\"rank\">Show</label> <select id=\"rank\" autocomplete=\"off\"><option value=\"all\">all ranks</option>{options}</select></p>"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_the_standard() {
        assert_eq!(sum("abc"), "sha256-ungWv48Bz+pBQUDeXa4iI7ADYaOWF3qctBD/YfIAFa0=");
        assert_eq!(sum(""), "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=");
    }

    #[test]
    fn every_place_of_the_template_is_filled_once() {
        let filled = fill(|place| format!("<{{{{{place}}}}}>"));
        assert_eq!(filled.matches("<{{").count(), TEMPLATE.matches("{{").count());
        assert!(TEMPLATE.contains("{{policy}}"));
    }

    #[test]
    fn the_assets_name_no_other_address() {
        for text in [TEMPLATE, STYLE, SCRIPT] {
            assert!(!["://", "@import", "url(", "fetch(", "XMLHttp"].iter().any(|part| text.contains(part)));
        }
    }
}
