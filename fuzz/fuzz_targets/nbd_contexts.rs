//! Target `nbd_contexts` for libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| pvblk_fuzz::nbd_contexts::nbd_contexts(data));
