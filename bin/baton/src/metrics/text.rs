//! The two text formats: OpenMetrics 1.0, and Prometheus' own, version 0.0.4. The second one is made of the first:
//! metadata of a counter names it with `_total` there, and there are no units and no end mark.

use super::families::{Families, Family, Kind};
use anyhow::{Context, Result};
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use std::collections::HashSet;

/// A format.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Format {
    /// Version 0.0.4.
    #[default]
    Prometheus,
    /// Version 1.0.0.
    OpenMetrics,
}

impl Format {
    /// As an HTTP header says it.
    pub fn content_type(self) -> &'static str {
        match self {
            Format::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// The one that a client likes best, by the value of its Accept header; OpenMetrics if it likes both the same.
    pub fn accepted(accept: &str) -> Format {
        let mut best = (0, Format::Prometheus);
        for range in accept.split(',') {
            let mut parts = range.split(';').map(str::trim);
            let kind = parts.next().unwrap_or_default().to_ascii_lowercase();
            let (mut quality, mut version) = (1000, None);
            for (key, value) in parts.filter_map(|part| part.split_once('=')) {
                match key.trim() {
                    "q" => quality = value.trim().parse::<f64>().map_or(0, |quality| (quality.clamp(0.0, 1.0) * 1000.0) as u32),
                    "version" => version = Some(value.trim().trim_matches('"')),
                    _ => {}
                }
            }
            let format = match (kind.as_str(), version) {
                ("application/openmetrics-text", None | Some("1.0.0")) => Format::OpenMetrics,
                ("text/plain" | "text/*" | "*/*", None | Some("0.0.4")) => Format::Prometheus,
                _ => continue,
            };
            // Of quality 0 is what the client does not want at all.
            if quality > best.0 || quality > 0 && quality == best.0 && format == Format::OpenMetrics {
                best = (quality, format);
            }
        }
        best.1
    }
}

/// Families as text.
///
/// # Errors
/// If the encoder refuses something.
pub fn render(families: Vec<Family>, format: Format) -> Result<String> {
    let counters = families.iter().filter(|family| family.kind == Kind::Counter);
    let counters: HashSet<String> = counters.map(Family::full_name).collect();
    let mut registry = Registry::with_prefix("baton");
    registry.register_collector(Box::new(Families(families)));
    let mut text = String::new();
    encode(&mut text, &registry).context("the counters as text")?;
    Ok(match format {
        Format::OpenMetrics => text,
        Format::Prometheus => to_prometheus(&text, &counters),
    })
}

fn to_prometheus(text: &str, counters: &HashSet<String>) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("EOF" | "UNIT"), ..) => continue,
            (Some("#"), Some(what @ ("HELP" | "TYPE")), Some(name), Some(rest)) if counters.contains(name) => {
                out.push_str(&format!("# {what} {name}_total {rest}\n"));
            }
            _ => {
                out.push_str(line);
                out.push('\n');
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::families::tests::baton;
    use super::super::families::{Own, families};
    use super::*;

    #[test]
    fn formats_are_negotiated() {
        // As Prometheus 2.42 and 3 ask, and curl, and a browser.
        let old = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        assert_eq!(Format::accepted(old), Format::OpenMetrics);
        let new =
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.4,*/*;q=0.2";
        assert_eq!(Format::accepted(new), Format::OpenMetrics);
        let text = "application/openmetrics-text;version=1.0.0;q=0.2, text/plain;version=0.0.4;q=0.9";
        assert_eq!(Format::accepted(text), Format::Prometheus);
        assert_eq!(Format::accepted("application/openmetrics-text; version=\"1.0.0\"; charset=utf-8"), Format::OpenMetrics);
        for accept in
            ["", "*/*", "text/html,application/xhtml+xml", "application/openmetrics-text;q=0", ";;=,=;q=x", "text/plain;q=nan"]
        {
            assert_eq!(Format::accepted(accept), Format::Prometheus, "{accept}");
        }
        assert_eq!(Format::accepted("application/openmetrics-text;version=2.0.0,text/plain;q=0.1"), Format::Prometheus);
    }

    #[test]
    fn both_formats_say_the_same() {
        let text = |format| render(families(&[baton()], Own::default(), None), format).expect("text");
        let (open, plain) = (text(Format::OpenMetrics), text(Format::Prometheus));
        assert!(open.ends_with("# EOF\n") && !plain.contains("# EOF") && !plain.contains("# UNIT"));
        let samples = |text: &str| text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(samples(&open), samples(&plain));
        for line in [
            "# TYPE baton_nic_busy_seconds counter",
            "# UNIT baton_nic_busy_seconds seconds",
            "baton_nic_sent_bytes_total{baton=\"/run/baton/agent.sock\",nic=\"0\"} 1099511627776",
            "baton_rtt_seconds_bucket{le=\"+Inf\",baton=\"/run/baton/agent.sock\"} 2",
            r#"baton_program_refusals_total{baton="/run/baton/agent.sock",program="nginx",user="33",cause="it says \"no\" \\ and\nmore"} 4"#,
        ] {
            assert!(open.lines().any(|known| known == line), "{line} is not in\n{open}");
        }
        assert!(plain.contains("# TYPE baton_nic_busy_seconds_total counter\n"), "{plain}");
        assert!(plain.contains("# HELP baton_moves_total Moves of connections"), "{plain}");
        assert!(plain.contains("# TYPE baton_rtt_seconds histogram\n"), "{plain}");
        // The encoder escapes nothing in them.
        assert!(open.lines().filter(|line| line.starts_with("# HELP")).all(|line| !line.contains(['"', '\\'])));
    }
}
