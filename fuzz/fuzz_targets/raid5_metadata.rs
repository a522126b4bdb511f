//! Target `raid5_metadata` for libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| pvblk_fuzz::raid5_metadata::raid5_metadata(data));
