//! Answers scrapes.

use super::families::Own;
use super::look::Looker;
use super::text::{Format, render};
use crate::serve::http::{Answer, Request};
use crate::serve::server::{Counts, Site};
use anyhow::Result;
use std::rc::Rc;

/// The same look in both formats, made when first wanted.
#[derive(Default)]
struct Texts {
    at: u64,
    texts: [Option<Rc<str>>; 2],
}

/// The exporter.
pub struct Exporter {
    looker: Looker,
    texts: Texts,
}

impl Exporter {
    /// Answers what a looker finds.
    pub fn new(looker: Looker) -> Exporter {
        Exporter { looker, texts: Texts::default() }
    }

    fn text(&mut self, format: Format, counts: Counts) -> Result<Rc<str>> {
        self.looker.renew();
        if self.texts.at != self.looker.seen_at() {
            self.texts = Texts { at: self.looker.seen_at(), texts: [None, None] };
        }
        let place = &mut self.texts.texts[usize::from(format == Format::OpenMetrics)];
        match place {
            Some(text) => Ok(text.clone()),
            None => {
                let own = Own { cut_off: counts.cut_off, refused: counts.refused, ..Own::default() };
                let text: Rc<str> = render(self.looker.families(own), format)?.into();
                Ok(place.insert(text).clone())
            }
        }
    }
}

impl Site for Exporter {
    fn answer(&mut self, request: &Request, _: Option<u32>, counts: Counts) -> Answer {
        match request.path.as_str() {
            "/metrics" => {
                let format = Format::accepted(&request.accept);
                match self.text(format, counts) {
                    Ok(body) => Answer { status: "200 OK", content_type: format.content_type(), headers: "", body },
                    Err(error) => Answer::line("500 Internal Server Error", &format!("{error:#}")),
                }
            }
            "/" => Answer::line("200 OK", "baton metrics: the counters are at /metrics"),
            _ => Answer::line("404 Not Found", "the counters are at /metrics"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_named() {
        let mut exporter = Exporter::new(Looker::new(crate::tools::tests::nowhere()));
        let mut ask = |path: &str| {
            let request = Request { path: path.into(), ..Request::default() };
            exporter.answer(&request, None, Counts::default())
        };
        assert!(ask("/").status.starts_with("200") && ask("/metrics").body.contains("baton_up{baton=\"/nowhere\"} 0"));
        let other = ask("/etc/passwd");
        assert!(other.status.starts_with("404") && other.body.contains("/metrics"), "{}", other.body);
    }
}
