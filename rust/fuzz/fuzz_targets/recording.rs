//! libFuzzer's door to `entries/recording.rs`.

#![no_main]

#[path = "../entries/recording.rs"]
mod recording;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    recording::run(data);
});
