//! Tells when something in a folder changes, by inotify. Only finished writes count: a file that is still
//! open for writing is not looked at before it is closed.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A watch on one folder.
#[derive(Debug)]
pub(super) struct Notice {
    fd: AsyncFd<OwnedFd>,
}

/// What happened.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Happened {
    /// These names in the folder changed.
    Changed {
        /// Names without the folder.
        names: HashSet<OsString>,
    },
    /// More changed than the kernel could tell: look at everything.
    Lost,
    /// The folder itself is gone: nothing more will be told.
    FolderGone,
}

impl Notice {
    /// Starts to watch.
    pub(super) fn new(folder: &Path) -> io::Result<Self> {
        let fd = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let events = WatchFlags::CLOSE_WRITE
            | WatchFlags::MOVED_TO
            | WatchFlags::MOVED_FROM
            | WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        inotify::add_watch(&fd, folder, events)?;
        #[expect(
            deprecated,
            reason = "deprecated because a type could change its descriptor, which OwnedFd never does; what \
                      replaces it is unsafe"
        )]
        let fd = AsyncFd::with_interest(fd, Interest::READABLE)?;
        Ok(Self { fd })
    }

    /// Waits until something happened, and takes all that has happened by then.
    pub(super) async fn next(&mut self) -> io::Result<Happened> {
        loop {
            let mut ready = self.fd.readable().await?;
            match drain(ready.get_inner()) {
                Ok(Some(happened)) => return Ok(happened),
                Ok(None) => ready.clear_ready(),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Reads every event that is there.
fn drain(fd: &OwnedFd) -> io::Result<Option<Happened>> {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(fd, &mut buffer);
    let (mut names, mut any, mut lost, mut folder_gone) = (HashSet::new(), false, false, false);
    loop {
        match reader.next() {
            Ok(event) => {
                any = true;
                let gone =
                    ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::IGNORED | ReadFlags::UNMOUNT;
                folder_gone |= event.events().intersects(gone);
                lost |= event.events().intersects(ReadFlags::QUEUE_OVERFLOW);
                if let Some(name) = event.file_name() {
                    names.insert(OsStr::from_bytes(name.to_bytes()).to_owned());
                }
            }
            Err(rustix::io::Errno::AGAIN) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(if folder_gone {
        Some(Happened::FolderGone)
    } else if lost {
        Some(Happened::Lost)
    } else {
        any.then_some(Happened::Changed { names })
    })
}
