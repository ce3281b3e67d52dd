//! How objects reach an engine: [`Event`]s, through a [`Handle`] if they come from another thread.
//!
//! A source is anything that sends events: a Kubernetes watch, a folder of files, your own code.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use ipnet::IpNet;

use crate::engine::Inspect;
use crate::model::{EndpointGroup, GroupName, NodeInfo, Problem, Service, ServiceName};
use crate::view::{HealthCheck, ListKind, NodeSettings, PortKey, PortView};

/// Something a source has to say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A service is new or changed.
    SetService(Box<Service>),
    /// A service is gone, or is not ours any more.
    DeleteService(ServiceName),
    /// An endpoint group is new or changed.
    SetGroup(Box<EndpointGroup>),
    /// An endpoint group is gone, or is not ours any more.
    DeleteGroup(GroupName),
    /// The node is known, or changed.
    SetNode(Box<NodeInfo>),
    /// An object gives ranges that service addresses come from.
    SetServiceRanges {
        /// The object's name.
        name: Arc<str>,
        /// The ranges.
        ranges: Vec<IpNet>,
    },
    /// An object that gave ranges is gone.
    DeleteServiceRanges(Arc<str>),
    /// The service addresses to leave alone are other ones now.
    SetExemptVips(Vec<IpAddr>),
    /// A full list begins: what does not come again until it is done is gone.
    ListStart(ListKind),
    /// A full list is complete. Nothing is programmed before all lists are (rule 6).
    ListDone(ListKind),
    /// A service port is new or changed, and all about it was decided elsewhere.
    SetPort(PortKey, Arc<PortView>),
    /// A service port that was decided elsewhere is gone.
    DeletePort(PortKey),
    /// A health check is new or changed, and was decided elsewhere.
    SetHealthCheck(ServiceName, HealthCheck),
    /// A health check that was decided elsewhere is gone.
    DeleteHealthCheck(ServiceName),
    /// What holds for the whole node is known or changed, and was decided elsewhere.
    SetSettings(Box<NodeSettings>),
    /// All that was said so far is one state of those that the source counts.
    State {
        /// Its number.
        revision: u64,
        /// When its changes happened, in milliseconds since 1970.
        triggered_ms: Vec<u64>,
    },
    /// Something in an object could not be used.
    Problem(Problem),
}

/// What goes through the channel between a [`Handle`] and its [`Inbox`].
pub(crate) enum Message {
    Event(Event),
    Events(Vec<Event>),
    Inspect(Box<dyn FnOnce(Inspect<'_>) + Send>),
    LookAgain,
    Compare,
    Stop,
}

/// Sends events to an engine on another thread. Clones send to the same one; when the last is gone, the
/// engine stops.
#[derive(Clone)]
pub struct Handle {
    sender: Sender<Message>,
}

/// Where the events of a [`Handle`] arrive; for [`engine::run`](crate::engine::run).
pub struct Inbox {
    pub(crate) receiver: Receiver<Message>,
}

/// The engine on the other end is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the service proxy's engine has stopped; start it again to continue")]
pub struct Stopped;

/// Makes a handle and its inbox.
#[must_use]
pub fn handle() -> (Handle, Inbox) {
    let (sender, receiver) = channel();
    (Handle { sender }, Inbox { receiver })
}

impl Handle {
    /// Sends an event. It never waits.
    ///
    /// # Errors
    /// If the engine has stopped.
    pub fn send(&self, event: Event) -> Result<(), Stopped> {
        self.sender.send(Message::Event(event)).map_err(|_| Stopped)
    }

    /// Sends events that belong together: the backend is not called between them. It never waits.
    ///
    /// # Errors
    /// If the engine has stopped.
    pub fn send_all(&self, events: Vec<Event>) -> Result<(), Stopped> {
        self.sender.send(Message::Events(events)).map_err(|_| Stopped)
    }

    /// Sends a service.
    ///
    /// # Errors
    /// If the engine has stopped.
    pub fn set_service(&self, service: Service) -> Result<(), Stopped> {
        self.send(Event::SetService(Box::new(service)))
    }

    /// Sends an endpoint group.
    ///
    /// # Errors
    /// If the engine has stopped.
    pub fn set_group(&self, group: EndpointGroup) -> Result<(), Stopped> {
        self.send(Event::SetGroup(Box::new(group)))
    }

    /// Says that all that there is at the start was sent.
    ///
    /// # Errors
    /// If the engine has stopped.
    pub fn all_listed(&self) -> Result<(), Stopped> {
        [ListKind::Services, ListKind::Groups, ListKind::ServiceRanges]
            .into_iter()
            .try_for_each(|kind| self.send(Event::ListDone(kind)))
    }

    /// Has the backend look at all that is there, because somebody else may have changed it. Soon, and the
    /// more seldom the more often this is asked for.
    ///
    /// # Errors
    /// If the engine has stopped.
    pub fn look_again(&self) -> Result<(), Stopped> {
        self.sender.send(Message::LookAgain).map_err(|_| Stopped)
    }

    /// Has the backend compare what is there with what it made, and repair what differs. It costs next to
    /// nothing where the backend can tell that nobody else changed anything.
    ///
    /// # Errors
    /// If the engine has stopped.
    pub fn compare(&self) -> Result<(), Stopped> {
        self.sender.send(Message::Compare).map_err(|_| Stopped)
    }

    /// Looks into the engine from its own thread, after all events sent so far, and hands back what was
    /// found.
    ///
    /// # Errors
    /// If the engine has stopped.
    pub fn inspect<T: Send + 'static>(
        &self,
        look: impl FnOnce(Inspect<'_>) -> T + Send + 'static,
    ) -> Result<T, Stopped> {
        let (sender, receiver) = channel();
        let look = Box::new(move |engine: Inspect<'_>| {
            // The one who asked may be gone; nobody else wants the answer.
            let _ = sender.send(look(engine));
        });
        self.sender.send(Message::Inspect(look)).map_err(|_| Stopped)?;
        receiver.recv().map_err(|_| Stopped)
    }

    /// Asks the engine to stop. What the backend made stays as it is.
    pub fn stop(&self) {
        // If it is gone already, it has stopped.
        let _ = self.sender.send(Message::Stop);
    }
}
