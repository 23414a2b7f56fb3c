//! libFuzzer's door to `entries/event_bytes.rs`.

#![no_main]

#[path = "../entries/event_bytes.rs"]
mod event_bytes;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    event_bytes::run(data);
});
