//! The encoding of image fields: little-endian, without padding; and the errors of decoding.

use crate::State;
use baton_wire::frame::Link;
use baton_wire::{Endpoint, Flow};

/// Why an image could not be decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ImageError {
    /// The magic bytes are missing.
    #[error("these bytes are not a connection image")]
    NotAnImage,
    /// Another version of Baton wrote it.
    #[error("connection image of version {found}, this program knows version {known}")]
    Version {
        /// Version of the image.
        found: u16,
        /// Version that this program reads.
        known: u16,
    },
    /// It ends before its last field.
    #[error("the connection image is truncated")]
    Truncated,
    /// Its length field does not match its fields.
    #[error("the connection image says it has {found} bytes, its fields have {expected}")]
    Length {
        /// Value of the length field, in bytes.
        found: usize,
        /// Length of all fields, in bytes.
        expected: usize,
    },
    /// Its digest does not match its bytes.
    #[error("the connection image is damaged: its digest does not match")]
    Digest,
    /// A field has a value that its type does not allow.
    #[error("the connection image has an impossible value")]
    Value,
    /// Two fields contradict each other.
    #[error("the connection image contradicts itself: {0}")]
    Inconsistent(&'static str),
}

/// The FNV-1a hash of the bytes. It detects damage only. Against forged images there is [`crate::Image::check`], and
/// the memory is writable only for trusted processes.
pub(crate) fn digest(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

pub(crate) struct Writer<'a> {
    out: &'a mut [u8],
    at: usize,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(out: &'a mut [u8]) -> Self {
        Writer { out, at: 0 }
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> Result<(), ImageError> {
        let room = self.out.get_mut(self.at..self.at + bytes.len()).ok_or(ImageError::Truncated)?;
        room.copy_from_slice(bytes);
        self.at += bytes.len();
        Ok(())
    }

    pub(crate) fn length(&self) -> usize {
        self.at
    }

    pub(crate) fn written(&self) -> &[u8] {
        // The digest covers what has been written so far.
        &self.out[..self.at]
    }

    pub(crate) fn patch_length(&mut self, length: u16) {
        self.out[6..8].copy_from_slice(&length.to_le_bytes());
    }
}

pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Reader { bytes, at: 0 }
    }

    pub(crate) fn position(&self) -> usize {
        self.at
    }
}

/// A value whose encoding has a fixed length.
pub(crate) trait Field: Sized {
    fn write(&self, out: &mut Writer<'_>) -> Result<(), ImageError>;
    fn read(input: &mut Reader<'_>) -> Result<Self, ImageError>;
}

impl<const N: usize> Field for [u8; N] {
    fn write(&self, out: &mut Writer<'_>) -> Result<(), ImageError> {
        out.bytes(self)
    }

    fn read(input: &mut Reader<'_>) -> Result<Self, ImageError> {
        let bytes = input.bytes.get(input.at..input.at + N).ok_or(ImageError::Truncated)?;
        input.at += N;
        bytes.try_into().map_err(|_| ImageError::Truncated)
    }
}

macro_rules! number {
    ($($type:ty),*) => {$(
        impl Field for $type {
            fn write(&self, out: &mut Writer<'_>) -> Result<(), ImageError> {
                out.bytes(&self.to_le_bytes())
            }

            fn read(input: &mut Reader<'_>) -> Result<Self, ImageError> {
                Field::read(input).map(<$type>::from_le_bytes)
            }
        }
    )*};
}
number!(u8, u16, u32, u64);

impl Field for bool {
    fn write(&self, out: &mut Writer<'_>) -> Result<(), ImageError> {
        u8::from(*self).write(out)
    }

    fn read(input: &mut Reader<'_>) -> Result<Self, ImageError> {
        match u8::read(input)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(ImageError::Value),
        }
    }
}

impl Field for State {
    fn write(&self, out: &mut Writer<'_>) -> Result<(), ImageError> {
        (*self as u8).write(out)
    }

    fn read(input: &mut Reader<'_>) -> Result<Self, ImageError> {
        State::from_number(u8::read(input)?).ok_or(ImageError::Value)
    }
}

/// A presence byte, then the value if there is one.
impl<T: Field> Field for Option<T> {
    fn write(&self, out: &mut Writer<'_>) -> Result<(), ImageError> {
        self.is_some().write(out)?;
        self.as_ref().map_or(Ok(()), |value| value.write(out))
    }

    fn read(input: &mut Reader<'_>) -> Result<Self, ImageError> {
        bool::read(input)?.then(|| T::read(input)).transpose()
    }
}

impl<A: Field, B: Field> Field for (A, B) {
    fn write(&self, out: &mut Writer<'_>) -> Result<(), ImageError> {
        self.0.write(out)?;
        self.1.write(out)
    }

    fn read(input: &mut Reader<'_>) -> Result<Self, ImageError> {
        Ok((A::read(input)?, B::read(input)?))
    }
}

impl Field for [u32; 4] {
    fn write(&self, out: &mut Writer<'_>) -> Result<(), ImageError> {
        self.iter().try_for_each(|number| number.write(out))
    }

    fn read(input: &mut Reader<'_>) -> Result<Self, ImageError> {
        Ok([u32::read(input)?, u32::read(input)?, u32::read(input)?, u32::read(input)?])
    }
}

/// Encodes a structure field by field. A field that is not named here breaks the build.
macro_rules! fields {
    ($type:ident { $($name:ident),* $(,)? }) => {
        impl Field for $type {
            fn write(&self, out: &mut Writer<'_>) -> Result<(), ImageError> {
                let $type { $($name),* } = self;
                $($name.write(out)?;)*
                Ok(())
            }

            fn read(input: &mut Reader<'_>) -> Result<Self, ImageError> {
                Ok($type { $($name: Field::read(input)?),* })
            }
        }
    };
}
pub(crate) use fields;

fields!(Endpoint { address, port });
fields!(Flow { local, remote, device });
fields!(Link { source, destination, ttl, tos, flow_label, interface });
