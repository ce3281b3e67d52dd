//! Files of objects: whatever is in them, the parser answers with objects and problems.

#![no_main]

use std::path::Path;

use knit_objects::{Kinds, check_file};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let kinds = Kinds::default();
    for name in ["x.yaml", "x.json"] {
        let (objects, problems) = check_file(Path::new(name), data, &kinds);
        // A problem says what and where; the parts of a key can be parts of a file's name.
        assert!(problems.iter().all(|p| !p.message.is_empty() && p.file.is_some()));
        for object in &objects {
            let (_, key) = object.split_once(' ').expect("kind and key");
            assert!(key.split('/').all(|part| !part.is_empty() && !part.starts_with('.')), "{key}");
        }
    }
});
