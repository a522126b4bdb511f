//! Target `nbd_requests` for libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| pvblk_fuzz::nbd_requests::nbd_requests(data));
