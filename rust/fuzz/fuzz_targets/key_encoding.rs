//! libFuzzer's door to `entries/key_encoding.rs`.

#![no_main]

#[path = "../entries/key_encoding.rs"]
mod key_encoding;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    key_encoding::run(data);
});
