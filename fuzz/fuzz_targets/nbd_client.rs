//! Target `nbd_client` for libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| pvblk_fuzz::nbd_client::nbd_client(data));
