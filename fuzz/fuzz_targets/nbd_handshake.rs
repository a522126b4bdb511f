//! Target `nbd_handshake` for libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| pvblk_fuzz::nbd_handshake::nbd_handshake(data));
