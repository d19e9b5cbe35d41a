//! BPF type information (BTF) of the running kernel: finds the type id of a tracepoint, and where a structure has a field.

use std::io;

const PATH: &str = "/sys/kernel/btf/vmlinux";
const MAGIC: u16 = 0xeb9f;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
const TYPEDEF: u32 = 8;

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Bytes that follow a type of this kind (Linux, Documentation/bpf/btf.rst).
fn tail(kind: u32, members: u32) -> usize {
    let members = members as usize;
    match kind {
        // INT, VAR, DECL_TAG.
        1 | 14 | 17 => 4,
        // ARRAY.
        3 => 12,
        // STRUCT, UNION, DATASEC, ENUM64.
        4 | 5 | 15 | 19 => 12 * members,
        // ENUM, FUNC_PROTO.
        6 | 13 => 8 * members,
        _ => 0,
    }
}

/// The types of a kernel, by number.
struct Types<'a> {
    bytes: &'a [u8],
    /// Where each type begins. Number 0 is void, which has no description.
    starts: Vec<usize>,
    strings: usize,
}

impl<'a> Types<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Types<'a>> {
        if bytes.get(..2)? != MAGIC.to_ne_bytes() {
            return None;
        }
        let header = word(bytes, 4)? as usize;
        let (first, length) = (header + word(bytes, 8)? as usize, word(bytes, 12)? as usize);
        let strings = header + word(bytes, 16)? as usize;
        let (mut at, mut starts) = (first, vec![0]);
        while at < first + length {
            starts.push(at);
            let info = word(bytes, at + 4)?;
            at += 12 + tail(info >> 24 & 0x1f, info & 0xffff);
        }
        Some(Types { bytes, starts, strings })
    }

    fn is_named(&self, offset: u32, name: &str) -> bool {
        let from = self.strings + offset as usize;
        self.bytes.get(from..from + name.len()) == Some(name.as_bytes()) && self.bytes.get(from + name.len()) == Some(&0)
    }

    /// Name, kind, and number of members of a type.
    fn head(&self, number: usize) -> Option<(u32, u32, u32)> {
        let at = *self.starts.get(number).filter(|_| number > 0)?;
        let info = word(self.bytes, at + 4)?;
        Some((word(self.bytes, at)?, info >> 24 & 0x1f, info & 0xffff))
    }

    /// The number of the type with this kind and name.
    fn find(&self, wanted: u32, name: &str) -> Option<usize> {
        let matches =
            |number: &usize| self.head(*number).is_some_and(|(named, kind, _)| kind == wanted && self.is_named(named, name));
        (1..self.starts.len()).find(matches)
    }

    /// The offset in bits of a structure's field, which may be a field of its nameless parts.
    fn field(&self, number: usize, name: &str) -> Option<u32> {
        let (_, _, members) = self.head(number).filter(|(_, kind, _)| matches!(*kind, STRUCT | UNION))?;
        let at = self.starts[number];
        let has_bit_fields = word(self.bytes, at + 4)? >> 31 != 0;
        (0..members as usize).find_map(|member| {
            let at = at + 12 + 12 * member;
            let (named, of, place) = (word(self.bytes, at)?, word(self.bytes, at + 4)?, word(self.bytes, at + 8)?);
            let place = if has_bit_fields { place & 0x00ff_ffff } else { place };
            if self.is_named(named, name) {
                return Some(place);
            }
            let nameless = self.is_named(named, "");
            nameless.then(|| self.field(of as usize, name)).flatten().map(|inner| place + inner)
        })
    }
}

/// The description of the running kernel's types.
fn running() -> io::Result<Vec<u8>> {
    std::fs::read(PATH)
        .map_err(|error| unsupported(format!("this kernel does not describe its types ({PATH}: {error}; CONFIG_DEBUG_INFO_BTF)")))
}

fn unsupported(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, why)
}

/// The id of a tracepoint's type.
///
/// # Errors
/// `Unsupported` if this kernel does not describe such a tracepoint.
pub(crate) fn tracepoint(name: &str) -> io::Result<u32> {
    let btf = running()?;
    let found = Types::parse(&btf).and_then(|types| types.find(TYPEDEF, &format!("btf_trace_{name}")));
    found.map(|number| number as u32).ok_or_else(|| unsupported(format!("this kernel has no tracepoint {name}")))
}

/// The offset in bits of a field in a structure of the kernel's.
///
/// # Errors
/// `Unsupported` if this kernel does not describe it.
pub(crate) fn field(structure: &str, name: &str) -> io::Result<u32> {
    let btf = running()?;
    let found = Types::parse(&btf).and_then(|types| types.field(types.find(STRUCT, structure)?, name));
    found.ok_or_else(|| unsupported(format!("this kernel's {structure} has no {name}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An INT, a STRUCT with one member, then the definition that is searched.
    #[test]
    fn a_definition_is_found_behind_types_of_other_lengths() {
        let strings = b"\0int\0btf_trace_x\0btf_trace_xy\0";
        let mut types = Vec::new();
        let mut put = |words: &[u32]| words.iter().for_each(|word| types.extend_from_slice(&word.to_ne_bytes()));
        put(&[1, 1 << 24, 4, 32]);
        put(&[0, 4 << 24 | 1, 4, 1, 1, 0]);
        put(&[17, TYPEDEF << 24, 1]);
        put(&[5, TYPEDEF << 24, 1]);
        let btf = described(&types, strings);
        let find = |btf: &[u8], name| Types::parse(btf)?.find(TYPEDEF, name);
        assert_eq!(find(&btf, "btf_trace_x"), Some(4));
        assert_eq!(find(&btf, "btf_trace_xy"), Some(3));
        assert_eq!(find(&btf, "btf_trace_"), None);
        assert_eq!(find(&btf[..60], "btf_trace_x"), None);
    }

    /// A structure with a field of its own and a nameless union, in which there is a nameless structure with a bit field.
    #[test]
    fn a_field_is_found_in_nameless_parts() {
        let strings = b"\0outer\0first\0hidden\0";
        let mut types = Vec::new();
        let mut put = |words: &[u32]| words.iter().for_each(|word| types.extend_from_slice(&word.to_ne_bytes()));
        put(&[1, STRUCT << 24 | 2, 16, 7, 4, 0, 0, 2, 32]);
        put(&[0, UNION << 24 | 1, 8, 0, 3, 0]);
        put(&[0, 1 << 31 | STRUCT << 24 | 1, 8, 13, 4, 2 << 24 | 21]);
        put(&[0, 1 << 24, 4, 32]);
        let btf = described(&types, strings);
        let types = Types::parse(&btf).unwrap();
        let outer = types.find(STRUCT, "outer").unwrap();
        assert_eq!(types.field(outer, "first"), Some(0));
        assert_eq!(types.field(outer, "hidden"), Some(32 + 21));
        assert_eq!(types.field(outer, "missing"), None);
    }

    /// Types and strings behind their header.
    fn described(types: &[u8], strings: &[u8]) -> Vec<u8> {
        let mut btf = Vec::new();
        btf.extend_from_slice(&MAGIC.to_ne_bytes());
        btf.extend_from_slice(&[1, 0]);
        for word in [24, 0, types.len() as u32, types.len() as u32, strings.len() as u32] {
            btf.extend_from_slice(&word.to_ne_bytes());
        }
        btf.extend_from_slice(types);
        btf.extend_from_slice(strings);
        btf
    }
}
