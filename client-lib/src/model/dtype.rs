//! Element types of both formats, with the sizes of their blocks.

use std::fmt;

/// One line per type: name, elements and bytes of a block, number in GGUF files, and the same type in the
/// safetensors library.
macro_rules! dtypes {
    ($($name:ident: $elements:literal, $bytes:literal, $ggml:expr, $safetensors:expr;)*) => {
        /// Type of a tensor's elements. A *block* is the least number of elements that has whole bytes: one for
        /// plain types, more for packed (F4, F6) and quantised ones.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[expect(missing_docs, reason = "the variants are the formats' own names and documented there")]
        #[expect(non_camel_case_types, reason = "the variants are spelt as the formats spell them")]
        pub enum Dtype { $($name,)* }

        impl Dtype {
            /// Every type.
            pub const ALL: &[Dtype] = &[$(Dtype::$name,)*];

            /// The name as the formats write it.
            pub fn name(self) -> &'static str {
                match self { $(Dtype::$name => stringify!($name),)* }
            }

            /// Elements and bytes of a block.
            pub fn block(self) -> (u64, u64) {
                match self { $(Dtype::$name => ($elements, $bytes),)* }
            }

            /// This type's number in a GGUF file, if that format has it.
            pub fn ggml_number(self) -> Option<u32> {
                match self { $(Dtype::$name => $ggml,)* }
            }

            /// The safetensors library's type, if that format has it.
            pub fn to_safetensors(self) -> Option<safetensors::Dtype> {
                match self { $(Dtype::$name => $safetensors,)* }
            }
        }
    };
}

// GGUF numbers 4, 5, 31 to 33 and 36 to 38 were types that ggml has removed.
dtypes! {
    F64: 1, 8, Some(28), Some(safetensors::Dtype::F64);
    F32: 1, 4, Some(0), Some(safetensors::Dtype::F32);
    F16: 1, 2, Some(1), Some(safetensors::Dtype::F16);
    BF16: 1, 2, Some(30), Some(safetensors::Dtype::BF16);
    I64: 1, 8, Some(27), Some(safetensors::Dtype::I64);
    I32: 1, 4, Some(26), Some(safetensors::Dtype::I32);
    I16: 1, 2, Some(25), Some(safetensors::Dtype::I16);
    I8: 1, 1, Some(24), Some(safetensors::Dtype::I8);
    BOOL: 1, 1, None, Some(safetensors::Dtype::BOOL);
    U8: 1, 1, None, Some(safetensors::Dtype::U8);
    U16: 1, 2, None, Some(safetensors::Dtype::U16);
    U32: 1, 4, None, Some(safetensors::Dtype::U32);
    U64: 1, 8, None, Some(safetensors::Dtype::U64);
    C64: 1, 8, None, Some(safetensors::Dtype::C64);
    F4: 2, 1, None, Some(safetensors::Dtype::F4);
    F6_E2M3: 4, 3, None, Some(safetensors::Dtype::F6_E2M3);
    F6_E3M2: 4, 3, None, Some(safetensors::Dtype::F6_E3M2);
    F8_E5M2: 1, 1, None, Some(safetensors::Dtype::F8_E5M2);
    F8_E4M3: 1, 1, None, Some(safetensors::Dtype::F8_E4M3);
    F8_E8M0: 1, 1, None, Some(safetensors::Dtype::F8_E8M0);
    F8_E4M3FNUZ: 1, 1, None, Some(safetensors::Dtype::F8_E4M3FNUZ);
    F8_E5M2FNUZ: 1, 1, None, Some(safetensors::Dtype::F8_E5M2FNUZ);
    Q4_0: 32, 18, Some(2), None;
    Q4_1: 32, 20, Some(3), None;
    Q5_0: 32, 22, Some(6), None;
    Q5_1: 32, 24, Some(7), None;
    Q8_0: 32, 34, Some(8), None;
    Q8_1: 32, 40, Some(9), None;
    Q2_K: 256, 84, Some(10), None;
    Q3_K: 256, 110, Some(11), None;
    Q4_K: 256, 144, Some(12), None;
    Q5_K: 256, 176, Some(13), None;
    Q6_K: 256, 210, Some(14), None;
    Q8_K: 256, 292, Some(15), None;
    IQ2_XXS: 256, 66, Some(16), None;
    IQ2_XS: 256, 74, Some(17), None;
    IQ3_XXS: 256, 98, Some(18), None;
    IQ1_S: 256, 50, Some(19), None;
    IQ4_NL: 32, 18, Some(20), None;
    IQ3_S: 256, 110, Some(21), None;
    IQ2_S: 256, 82, Some(22), None;
    IQ4_XS: 256, 136, Some(23), None;
    IQ1_M: 256, 56, Some(29), None;
    TQ1_0: 256, 54, Some(34), None;
    TQ2_0: 256, 66, Some(35), None;
    MXFP4: 32, 17, Some(39), None;
    NVFP4: 64, 36, Some(40), None;
    Q1_0: 128, 18, Some(41), None;
}

impl Dtype {
    /// The type with this number in a GGUF file.
    pub fn from_ggml(number: u32) -> Option<Dtype> {
        Dtype::ALL.iter().copied().find(|dtype| dtype.ggml_number() == Some(number))
    }

    /// The type for one of the safetensors library; `None` for one that the library learnt later.
    pub fn from_safetensors(dtype: safetensors::Dtype) -> Option<Dtype> {
        Dtype::ALL.iter().copied().find(|ours| ours.to_safetensors() == Some(dtype))
    }

    /// Bytes of so many elements; `None` if they are no whole blocks or overflow 64 bits.
    pub fn bytes(self, elements: u64) -> Option<u64> {
        let (block_elements, block_bytes) = self.block();
        if !elements.is_multiple_of(block_elements) {
            return None;
        }
        (elements / block_elements).checked_mul(block_bytes)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn safetensors_blocks_agree_with_the_library() {
        let mut seen = 0;
        for dtype in Dtype::ALL {
            let Some(theirs) = dtype.to_safetensors() else { continue };
            let (elements, bytes) = dtype.block();
            assert_eq!(u64::try_from(theirs.bitsize()).unwrap() * elements, bytes * 8, "{dtype}");
            assert_eq!(theirs.to_string(), dtype.name());
            assert_eq!(Dtype::from_safetensors(theirs), Some(*dtype));
            seen += 1;
        }
        assert_eq!(seen, 22);
    }

    #[test]
    fn ggml_numbers_are_unique_and_complete() {
        let known: Vec<u32> =
            (0..100).filter(|number| Dtype::from_ggml(*number).is_some()).collect();
        let removed = [4, 5, 31, 32, 33, 36, 37, 38];
        let expected: Vec<u32> = (0..=41).filter(|number| !removed.contains(number)).collect();
        assert_eq!(known, expected);
        let with_number = Dtype::ALL.iter().filter(|dtype| dtype.ggml_number().is_some()).count();
        assert_eq!(with_number, 34);
    }

    #[test]
    fn bytes_are_of_whole_blocks() {
        assert_eq!(Dtype::F4.bytes(3), None);
        assert_eq!(Dtype::F4.bytes(4), Some(2));
        assert_eq!(Dtype::F6_E2M3.bytes(8), Some(6));
        assert_eq!(Dtype::Q4_K.bytes(512), Some(288));
        assert_eq!(Dtype::Q4_K.bytes(511), None);
        assert_eq!(Dtype::F64.bytes(u64::MAX / 4), None);
        assert_eq!(Dtype::NVFP4.bytes(0), Some(0));
    }
}
