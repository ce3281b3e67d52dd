//! The numbers of nfnetlink and nf_tables, by the names that they have in the kernel's uapi headers, without
//! prefixes (`NFTA_TABLE_NAME` is `table::NAME`).
#![allow(missing_docs, reason = "linux/netfilter/nf_tables.h says what they mean")]

/// `NFNL_SUBSYS_NFTABLES` in the upper byte of a message type.
pub const SUBSYSTEM: u16 = 10;
pub const BATCH_BEGIN: u16 = 16;
pub const BATCH_END: u16 = 17;
pub const BATCH_GENID: u16 = 1;

/// Message types.
pub mod msg {
    use super::SUBSYSTEM;

    const fn of(number: u16) -> u16 {
        SUBSYSTEM << 8 | number
    }

    pub const NEWTABLE: u16 = of(0);
    pub const GETTABLE: u16 = of(1);
    pub const DELTABLE: u16 = of(2);
    pub const NEWCHAIN: u16 = of(3);
    pub const GETCHAIN: u16 = of(4);
    pub const DELCHAIN: u16 = of(5);
    pub const NEWRULE: u16 = of(6);
    pub const GETRULE: u16 = of(7);
    pub const DELRULE: u16 = of(8);
    pub const NEWSET: u16 = of(9);
    pub const GETSET: u16 = of(10);
    pub const DELSET: u16 = of(11);
    pub const NEWSETELEM: u16 = of(12);
    pub const GETSETELEM: u16 = of(13);
    pub const DELSETELEM: u16 = of(14);
    pub const NEWGEN: u16 = of(15);
    pub const GETGEN: u16 = of(16);
}

macro_rules! attributes {
    ($($module:ident { $($name:ident = $number:literal),* $(,)? })*) => {$(
        pub mod $module {
            $(pub const $name: u16 = $number;)*
        }
    )*};
}

attributes! {
    table { NAME = 1, FLAGS = 2, USERDATA = 6 }
    chain { TABLE = 1, NAME = 3, HOOK = 4, POLICY = 5, TYPE = 7, USERDATA = 12 }
    hook { NUM = 1, PRIORITY = 2, DEV = 3, DEVS = 4 }
    device { NAME = 1 }
    rule { TABLE = 1, CHAIN = 2, HANDLE = 3, EXPRESSIONS = 4, POSITION = 6, USERDATA = 7 }
    set {
        TABLE = 1, NAME = 2, FLAGS = 3, KEY_TYPE = 4, KEY_LEN = 5, DATA_TYPE = 6, DATA_LEN = 7, DESC = 9,
            ID = 10,
        TIMEOUT = 11, USERDATA = 13, EXPR = 17,
    }
    set_desc { SIZE = 1, CONCAT = 2 }
    set_field { LEN = 1 }
    list { ELEM = 1 }
    elem_list { TABLE = 1, SET = 2, ELEMENTS = 3, SET_ID = 4 }
    elem { KEY = 1, DATA = 2, FLAGS = 3, TIMEOUT = 4, EXPIRATION = 5, USERDATA = 6, EXPR = 7, KEY_END = 10 }
    data { VALUE = 1, VERDICT = 2 }
    verdict { CODE = 1, CHAIN = 2 }
    expr { NAME = 1, DATA = 2 }
    immediate { DREG = 1, DATA = 2 }
    bitwise { SREG = 1, DREG = 2, LEN = 3, MASK = 4, XOR = 5, OP = 6 }
    cmp { SREG = 1, OP = 2, DATA = 3 }
    range { SREG = 1, OP = 2, FROM = 3, TO = 4 }
    lookup { SET = 1, SREG = 2, DREG = 3, SET_ID = 4, FLAGS = 5 }
    dynset { SET_NAME = 1, OP = 3, SREG_KEY = 4, SREG_DATA = 5, TIMEOUT = 6, EXPR = 7, EXPRESSIONS = 10 }
    payload {
        DREG = 1, BASE = 2, OFFSET = 3, LEN = 4, SREG = 5, CSUM_TYPE = 6, CSUM_OFFSET = 7, CSUM_FLAGS = 8,
    }
    meta { DREG = 1, KEY = 2, SREG = 3 }
    ct { DREG = 1, KEY = 2, DIRECTION = 3, SREG = 4 }
    fib { DREG = 1, RESULT = 2, FLAGS = 3 }
    socket { KEY = 1, DREG = 2, LEVEL = 3 }
    numgen { DREG = 1, MODULUS = 2, TYPE = 3, OFFSET = 4 }
    hash { SREG = 1, DREG = 2, LEN = 3, MODULUS = 4, SEED = 5, OFFSET = 6, TYPE = 7 }
    nat { TYPE = 1, FAMILY = 2, ADDR_MIN = 3, ADDR_MAX = 4, PROTO_MIN = 5, PROTO_MAX = 6, FLAGS = 7 }
    masq { FLAGS = 1, PROTO_MIN = 2, PROTO_MAX = 3 }
    redir { PROTO_MIN = 1, PROTO_MAX = 2, FLAGS = 3 }
    tproxy { FAMILY = 1, REG_ADDR = 2, REG_PORT = 3 }
    reject { TYPE = 1, CODE = 2 }
    counter { BYTES = 1, PACKETS = 2 }
    connlimit { COUNT = 1, FLAGS = 2 }
    limit { RATE = 1, UNIT = 2, BURST = 3, TYPE = 4, FLAGS = 5 }
    log { GROUP = 1, PREFIX = 2, SNAPLEN = 3, LEVEL = 5 }
    gen_id { ID = 1 }
    udata { TABLE_COMMENT = 0, CHAIN_COMMENT = 0, RULE_COMMENT = 0, ELEM_COMMENT = 0, SET_COMMENT = 7 }
}

/// `NFT_SET_*`.
pub mod set_flag {
    pub const ANONYMOUS: u32 = 0x1;
    pub const CONSTANT: u32 = 0x2;
    pub const INTERVAL: u32 = 0x4;
    pub const MAP: u32 = 0x8;
    pub const TIMEOUT: u32 = 0x10;
    pub const EVAL: u32 = 0x20;
    pub const CONCAT: u32 = 0x80;
    pub const EXPR: u32 = 0x100;
}

/// `NFT_SET_ELEM_*`.
pub const ELEM_INTERVAL_END: u32 = 1;
/// `NFT_DATA_VERDICT`.
pub const DATA_VERDICT: u32 = 0xffff_ff00;
/// `NFT_TABLE_F_DORMANT`.
pub const TABLE_DORMANT: u32 = 1;

/// `NFT_CONTINUE`, `NFT_JUMP`, `NFT_GOTO`, `NFT_RETURN` and the netfilter verdicts.
pub mod code {
    pub const DROP: i32 = 0;
    pub const ACCEPT: i32 = 1;
    pub const CONTINUE: i32 = -1;
    pub const JUMP: i32 = -3;
    pub const GOTO: i32 = -4;
    pub const RETURN: i32 = -5;
}
