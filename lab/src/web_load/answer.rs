//! A client's side of HTTP/1.1: an answer that comes in pieces of any size. No I/O.

use httparse::{EMPTY_HEADER, Response, Status};

/// Most bytes of a head, and of a line between chunks.
const HEAD: usize = 16 << 10;
const LINE: usize = 1 << 10;
/// Most headers of an answer.
const HEADERS: usize = 64;

/// What comes next.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
enum State {
    #[default]
    Head,
    /// So many bytes of the body.
    Body(u64),
    /// The line with a chunk's size.
    Size,
    /// So many bytes of a chunk.
    Chunk(u64),
    /// The end of the line after a chunk.
    ChunkEnd,
    /// Lines up to an empty one.
    Trailer,
    /// The body, which ends with the connection.
    Rest,
    Done,
}

/// An answer.
#[derive(Default, Debug)]
pub struct Answer {
    state: State,
    /// What has come of the head, or of a line between chunks.
    text: Vec<u8>,
    status: u16,
    length: Option<u64>,
    keeps: bool,
}

/// Takes up to `most` bytes from the front.
fn front<'a>(bytes: &mut &'a [u8], most: u64) -> &'a [u8] {
    let whole = *bytes;
    let (taken, rest) = whole.split_at(usize::try_from(most).unwrap_or(usize::MAX).min(whole.len()));
    *bytes = rest;
    taken
}

impl Answer {
    /// Its status; 0 before its head has come.
    pub fn status(&self) -> u16 {
        self.status
    }

    /// Bytes of its body, if its head says that.
    pub fn length(&self) -> Option<u64> {
        self.length
    }

    /// Whether the connection can carry another request after it.
    pub fn keeps(&self) -> bool {
        self.keeps
    }

    /// Whether it is whole.
    pub fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// The connection has ended. Whether the answer is whole.
    pub fn end(&mut self) -> bool {
        if self.state == State::Rest {
            self.state = State::Done;
        }
        self.is_done()
    }

    /// Takes the next piece of its body from the front of `bytes`. None if more has to come first, or it is whole.
    ///
    /// # Errors
    /// If this is no answer.
    pub fn body<'a>(&mut self, bytes: &mut &'a [u8]) -> Result<Option<&'a [u8]>, &'static str> {
        loop {
            match self.state {
                State::Done => return Ok(None),
                _ if bytes.is_empty() => return Ok(None),
                State::Head => {
                    if self.line(bytes, HEAD)? && [b"\r\n\r\n".as_slice(), b"\n\n"].iter().any(|end| self.text.ends_with(end)) {
                        self.read_head()?;
                    }
                }
                State::Body(left) => {
                    let piece = front(bytes, left);
                    let left = left - piece.len() as u64;
                    self.state = if left == 0 { State::Done } else { State::Body(left) };
                    return Ok(Some(piece));
                }
                State::Chunk(left) => {
                    let piece = front(bytes, left);
                    let left = left - piece.len() as u64;
                    self.state = if left == 0 { State::ChunkEnd } else { State::Chunk(left) };
                    return Ok(Some(piece));
                }
                State::Rest => return Ok(Some(front(bytes, u64::MAX))),
                State::Size | State::ChunkEnd | State::Trailer => {
                    if self.line(bytes, LINE)? {
                        self.state = self.after_line()?;
                        self.text.clear();
                    }
                }
            }
        }
    }

    /// Takes bytes up to the end of a line. Whether that has come.
    fn line(&mut self, bytes: &mut &[u8], most: usize) -> Result<bool, &'static str> {
        let length = bytes.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |at| at + 1);
        self.text.extend_from_slice(front(bytes, length as u64));
        if self.text.len() > most {
            return Err("an answer's head is too long");
        }
        Ok(self.text.ends_with(b"\n"))
    }

    /// What comes after a line between chunks.
    fn after_line(&self) -> Result<State, &'static str> {
        let empty = matches!(self.text[..], [b'\n'] | [b'\r', b'\n']);
        match self.state {
            State::Size => match httparse::parse_chunk_size(&self.text) {
                Ok(Status::Complete((_, 0))) => Ok(State::Trailer),
                Ok(Status::Complete((_, size))) => Ok(State::Chunk(size)),
                _ => Err("a chunk has no size"),
            },
            State::ChunkEnd if !empty => Err("a chunk is longer than its size"),
            State::ChunkEnd => Ok(State::Size),
            _ if empty => Ok(State::Done),
            state => Ok(state),
        }
    }

    /// Reads the head, which is whole.
    fn read_head(&mut self) -> Result<(), &'static str> {
        let mut headers = [EMPTY_HEADER; HEADERS];
        let mut response = Response::new(&mut headers);
        let Ok(Status::Complete(_)) = response.parse(&self.text) else { return Err("this is no HTTP answer") };
        let status = response.code.unwrap_or(0);
        let (mut keeps, mut length, mut chunked) = (response.version == Some(1), None::<u64>, false);
        for header in response.headers.iter() {
            let value = String::from_utf8_lossy(header.value).to_ascii_lowercase();
            if header.name.eq_ignore_ascii_case("content-length") {
                length = Some(value.trim().parse::<u64>().map_err(|_| "an answer's length is no number")?);
            } else if header.name.eq_ignore_ascii_case("transfer-encoding") {
                chunked = value.trim().ends_with("chunked");
            } else if header.name.eq_ignore_ascii_case("connection") {
                for word in value.split(',') {
                    match word.trim() {
                        "close" => keeps = false,
                        "keep-alive" => keeps = true,
                        _ => {}
                    }
                }
            }
        }
        self.text.clear();
        // An interim answer: another one follows.
        if (100..200).contains(&status) {
            return Ok(());
        }
        self.status = status;
        self.length = length.filter(|_| !chunked);
        self.state = match (chunked, self.length) {
            _ if matches!(status, 204 | 304) => State::Done,
            (true, _) => State::Size,
            (false, Some(0)) => State::Done,
            (false, Some(length)) => State::Body(length),
            (false, None) => State::Rest,
        };
        self.keeps = keeps && self.state != State::Rest;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives an answer in pieces of `size` bytes. Its body, and what is left behind it.
    fn read(text: &[u8], size: usize) -> Result<(Answer, Vec<u8>, usize), &'static str> {
        let (mut answer, mut body, mut left) = (Answer::default(), Vec::new(), 0);
        for mut piece in text.chunks(size) {
            while let Some(more) = answer.body(&mut piece)? {
                body.extend_from_slice(more);
            }
            left += piece.len();
        }
        Ok((answer, body, left))
    }

    fn read_in_all_sizes(text: &[u8]) -> (Answer, Vec<u8>, usize) {
        let whole = read(text, text.len()).unwrap();
        for size in 1..text.len() {
            let (answer, body, left) = read(text, size).unwrap();
            assert_eq!((answer.is_done(), body, left), (whole.0.is_done(), whole.1.clone(), whole.2), "in pieces of {size}");
        }
        whole
    }

    #[test]
    fn bodies_of_a_known_length() {
        let (answer, body, left) = read_in_all_sizes(b"HTTP/1.1 200 OK\r\nServer: a\r\nContent-Length: 5\r\n\r\nhello");
        assert!(answer.is_done() && answer.keeps());
        assert_eq!((answer.status(), answer.length(), body, left), (200, Some(5), b"hello".to_vec(), 0));
        let (answer, body, left) = read_in_all_sizes(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nabc");
        assert_eq!((answer.is_done(), body, left), (true, b"a".to_vec(), 2), "bytes behind it are left");
        let interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 Gone\r\nContent-Length: 0\r\n\r\n";
        let (answer, _, _) = read_in_all_sizes(interim);
        assert_eq!((answer.status(), answer.is_done()), (404, true));
        let (mut answer, _, _) = read_in_all_sizes(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello");
        assert!(!answer.is_done() && !answer.end(), "it is cut off");
    }

    #[test]
    fn bodies_in_chunks() {
        let text = b"HTTP/1.1 200 OK\r\nTransfer-Encoding:chunked\r\n\r\n5\r\nhello\r\nb;a=b\r\n, all of it\r\n0\r\nX: y\r\n\r\n";
        let (answer, body, left) = read_in_all_sizes(text);
        assert!(answer.is_done() && answer.keeps());
        assert_eq!((body, left, answer.length()), (b"hello, all of it".to_vec(), 0, None));
    }

    #[test]
    fn bodies_that_end_with_the_connection() {
        let (mut answer, body, _) = read_in_all_sizes(b"HTTP/1.0 200 OK\r\n\r\nhello");
        assert!(!answer.is_done() && !answer.keeps() && answer.end() && answer.is_done());
        assert_eq!(body, b"hello");
    }

    #[test]
    fn connections_are_kept_as_the_answer_says() {
        for (head, keeps) in [
            ("HTTP/1.1 200 OK\r\n", true),
            ("HTTP/1.1 200 OK\r\nConnection: Close\r\n", false),
            ("HTTP/1.0 200 OK\r\n", false),
            ("HTTP/1.0 200 OK\r\nconnection: keep-alive\r\n", true),
        ] {
            let text = format!("{head}Content-Length: 1\r\n\r\na");
            assert_eq!(read(text.as_bytes(), 7).unwrap().0.keeps(), keeps, "{head}");
        }
    }

    #[test]
    fn what_is_no_answer_is_an_error() {
        let no = |text: &[u8]| read(text, 64).err();
        assert_eq!(no(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), Some("this is no HTTP answer"));
        assert_eq!(no(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"), Some("an answer's length is no number"));
        assert_eq!(no(&vec![b'a'; HEAD + 1]), Some("an answer's head is too long"));
        let chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".as_slice();
        assert_eq!(no(&[chunked, b"x\r\n"].concat()), Some("a chunk has no size"));
        assert_eq!(no(&[chunked, b"1\r\nabc\r\n"].concat()), Some("a chunk is longer than its size"));
    }
}
