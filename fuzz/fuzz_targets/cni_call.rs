//! Environment and standard input of the CNI shim: anything is a call that fits into a frame, or an error of
//! CNI.
#![no_main]

use knit_cni::call::{Call, Environment};
use knit_cni::protocol::{Request, encode, receive};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|case: (u8, String, String, String, String, &[u8])| {
    let (command, container_id, netns, ifname, args, input) = case;
    let commands = ["ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"];
    let command = commands[usize::from(command) % commands.len()].to_owned();
    let environment = Environment { command, container_id, netns, ifname, args, path: String::new() };
    match Call::parse(&environment, input) {
        Ok(Call::Version { .. }) => {}
        Ok(Call::Agent(call)) => {
            let frame = encode(&call.request).expect("a frame");
            assert_eq!(receive::<Request>(&mut &frame[..]).expect("it survives the way"), call.request);
        }
        Err(refusal) => assert!(matches!(refusal.error.code, 1 | 4 | 6 | 7)),
    }
});
