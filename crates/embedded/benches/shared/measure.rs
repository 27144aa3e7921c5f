//! Shared by the benchmarks: medians, CPU time, tables.
#![allow(dead_code, reason = "each benchmark uses its part")]

/// The median, which is robust against a busy moment.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        len if len % 2 == 1 => values[half],
        _ => f64::midpoint(values[half - 1], values[half]),
    }
}

/// CPU time of the process's threads: more meaningful than wall time on a shared machine.
pub fn cpu_secs() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux tells a process about itself");
    let times = tasks.flatten().map(|task| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
        text.split(' ').next().and_then(|nanos| nanos.parse::<f64>().ok()).unwrap_or(0.0)
    });
    times.sum::<f64>() / 1e9
}

/// CPU time of a process: of its threads, also of those that have ended, and of the processes that it has waited for.
pub fn cpu_secs_of(process: &str) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).expect("the process runs");
    // Behind the name, which is in brackets: the times are the 14th to the 17th of all, in hundredths of a second.
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(4).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}

/// Formats a whole number with commas.
pub fn thousands(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut grouped = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// Prints a table, in Markdown or for a terminal.
pub fn table(markdown: bool, title: &str, columns: &[&str], rows: &[Vec<String>]) {
    println!("\n{}{title}\n", if markdown { "### " } else { "" });
    if markdown {
        println!("| {} |", columns.join(" | "));
        println!("|{}", "--:|".repeat(columns.len()));
        for row in rows {
            println!("| {} |", row.join(" | "));
        }
        return;
    }
    let wide = |at: usize| rows.iter().map(|row| row[at].len()).chain([columns[at].len()]).max().unwrap_or(0);
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded: Vec<_> = cells.enumerate().map(|(at, cell)| format!("{cell:>0$}", wide(at))).collect();
        println!("  {}", padded.join("  "));
    };
    line(&mut columns.iter().copied());
    for row in rows {
        line(&mut row.iter().map(String::as_str));
    }
}
