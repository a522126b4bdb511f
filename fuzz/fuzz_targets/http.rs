//! Target `http` for libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| pvblk_fuzz::http::http(data));
