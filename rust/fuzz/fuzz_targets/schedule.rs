//! libFuzzer's door to `entries/schedule.rs`.

#![no_main]

#[path = "../entries/schedule.rs"]
mod schedule;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    schedule::run(data);
});
