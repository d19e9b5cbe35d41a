//! BPF type information (BTF) of the running kernel: finds the type ids of tracepoints and of functions that programs
//! may call.

use std::io;

const PATH: &str = "/sys/kernel/btf/vmlinux";
const MAGIC: u16 = 0xeb9f;
/// Kinds of types.
const TYPEDEF: u32 = 8;
const FUNCTION: u32 = 12;

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

/// The id of a type of this kind.
fn find(btf: &[u8], wanted: u32, name: &str) -> Option<u32> {
    if btf.get(..2)? != MAGIC.to_ne_bytes() {
        return None;
    }
    let header = word(btf, 4)? as usize;
    let (types, types_length) = (header + word(btf, 8)? as usize, word(btf, 12)? as usize);
    let strings = header + word(btf, 16)? as usize;
    let is_named = |offset: u32| {
        let from = strings + offset as usize;
        btf.get(from..from + name.len()) == Some(name.as_bytes()) && btf.get(from + name.len()) == Some(&0)
    };
    let (mut at, mut number) = (types, 1);
    while at < types + types_length {
        let (named, info) = (word(btf, at)?, word(btf, at + 4)?);
        let (kind, members) = (info >> 24 & 0x1f, info & 0xffff);
        if kind == wanted && is_named(named) {
            return Some(number);
        }
        at += 12 + tail(kind, members);
        number += 1;
    }
    None
}

fn search(kind: u32, name: &str) -> io::Result<Option<u32>> {
    let explain = |error| format!("this kernel does not describe its types ({PATH}: {error}; CONFIG_DEBUG_INFO_BTF)");
    let btf = std::fs::read(PATH).map_err(|error| unsupported(explain(error)))?;
    Ok(find(&btf, kind, name))
}

fn unsupported(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, why)
}

/// The id of a tracepoint's type.
///
/// # Errors
/// `Unsupported` if this kernel does not describe such a tracepoint.
pub(crate) fn tracepoint(name: &str) -> io::Result<u32> {
    search(TYPEDEF, &format!("btf_trace_{name}"))?.ok_or_else(|| unsupported(format!("this kernel has no tracepoint {name}")))
}

/// The id of a kernel function.
///
/// # Errors
/// `Unsupported` if this kernel does not describe such a function.
pub(crate) fn function(name: &str) -> io::Result<u32> {
    search(FUNCTION, name)?.ok_or_else(|| unsupported(format!("this kernel has no function {name}")))
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
        let mut btf = Vec::new();
        btf.extend_from_slice(&MAGIC.to_ne_bytes());
        btf.extend_from_slice(&[1, 0]);
        for word in [24, 0, types.len() as u32, types.len() as u32, strings.len() as u32] {
            btf.extend_from_slice(&word.to_ne_bytes());
        }
        btf.extend_from_slice(&types);
        btf.extend_from_slice(strings);
        assert_eq!(find(&btf, TYPEDEF, "btf_trace_x"), Some(4));
        assert_eq!(find(&btf, TYPEDEF, "btf_trace_xy"), Some(3));
        assert_eq!(find(&btf, TYPEDEF, "btf_trace_"), None);
        assert_eq!(find(&btf, FUNCTION, "btf_trace_x"), None);
        assert_eq!(find(&btf[..60], TYPEDEF, "btf_trace_x"), None);
    }
}
