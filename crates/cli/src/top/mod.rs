//! `forebay top`: the processes of this machine that use forebay and publish their figures.

mod published;

use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use console::{Term, truncate_str};
use forebay::Error;
use serde::Serialize;

use crate::options::TopArgs;
use crate::output::check_writable;
use crate::tables::{columns, size};
use crate::{Failure, SUCCESS, report};
use published::{Published, Refused, default_folders, read};

/// Figures that are older belong to a process that was stopped.
const OLD_S: f64 = 10.0;

const NOTHING: &str = "no process of this user publishes figures\n\
    hint: call forebay.publish() in the program that is to be watched\n";

#[derive(Serialize)]
struct Top {
    schema: u64,
    processes: Vec<Published>,
}

pub(crate) fn top(args: &TopArgs) -> Result<u8, Failure> {
    let json = &args.output.json;
    json.path().map_or(Ok(()), check_writable)?;
    let term = Term::buffered_stdout();
    if args.once || json.to_stdout() || json.path().is_some() || !term.is_term() {
        let top = Top { schema: 1, processes: processes(args.folder.as_deref())? };
        report(json, &top, || table(&top.processes))?;
        return Ok(SUCCESS);
    }
    let mut drawn = 0;
    loop {
        let text = table(&processes(args.folder.as_deref())?);
        let (height, width) = term.size();
        let lines: Vec<&str> = text.lines().take(usize::from(height).saturating_sub(1).max(2)).collect();
        let draw = || -> std::io::Result<()> {
            if drawn > 0 {
                term.move_cursor_up(drawn)?;
                term.clear_to_end_of_screen()?;
            }
            for line in &lines {
                // A line that wrapped would be two, and the next picture would begin too low.
                term.write_line(&truncate_str(line, usize::from(width), ""))?;
            }
            term.flush()
        };
        draw().map_err(|error| Failure::Write { path: "to the terminal".to_owned(), error })?;
        drawn = lines.len();
        sleep(Duration::from_secs_f64(args.every));
    }
}

fn processes(folder: Option<&Path>) -> Result<Vec<Published>, Failure> {
    let Some(folder) = folder else {
        return Ok(default_folders().iter().filter_map(|folder| read(folder).ok()).flatten().collect());
    };
    read(folder).map_err(|refused| {
        let remedy = match refused {
            Refused::Absent => "give the folder that was given to forebay.publish, which makes it",
            Refused::NotOurs => "give a folder that is this user's alone, with mode 0700, and no link to one",
        };
        Failure::Engine(Error::InvalidOption {
            option: "folder",
            value: folder.display().to_string(),
            remedy: remedy.to_owned(),
        })
    })
}

fn table(processes: &[Published]) -> String {
    if processes.is_empty() {
        return NOTHING.to_owned();
    }
    let titles = ["pid", "command", "rank", "device", "pinned", "fetch GB/s", "store GB/s", "stalls", "saves", ""];
    let mut rows = vec![titles.map(str::to_owned)];
    rows.extend(processes.iter().map(|one| {
        let old = if one.age_s > OLD_S { format!("silent for {:.0} s", one.age_s) } else { String::new() };
        [
            one.pid.to_string(),
            one.command.clone(),
            one.rank.to_string(),
            one.device.clone(),
            size(one.pinned_bytes),
            format!("{:.2}", one.fetch_gbps),
            format!("{:.2}", one.store_gbps),
            format!("{} ({:.1} s)", one.stalls, one.stall_s),
            one.saves.to_string(),
            old,
        ]
    }));
    columns(&rows)
}
