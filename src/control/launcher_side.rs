//! The launcher's end of one worker's channel.
//!
//! Nothing here blocks the launcher: one thread accepts and reads, another sends, so that a worker that is
//! stopped in the middle of a message holds up nobody else.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;

use ipc_channel::IpcError;
use ipc_channel::ipc::{IpcOneShotServer, IpcReceiver, IpcSender};

use super::{ControlError, FromWorker, SocketFolder, ToWorker, WorkerName};

/// What comes out of a worker's channel.
#[derive(Debug)]
pub enum Incoming {
    /// It said Hello: this process is who it should be.
    Hello {
        /// Its process, by its own account.
        pid: u32,
    },
    /// Any later message.
    Message(FromWorker),
    /// The channel has ended, normally by the worker's end, else for the reason given.
    Closed(Option<String>),
}

/// A socket that waits for one worker.
pub struct Door {
    worker: WorkerName,
    path: String,
    server: IpcOneShotServer<FromWorker>,
}

impl Door {
    /// Opens the socket.
    ///
    /// # Errors
    ///
    /// [`ControlError::Socket`] when the system refuses, or the path is too long for a socket.
    pub fn open(folder: &SocketFolder, worker: WorkerName) -> Result<Self, ControlError> {
        let failed = |source| ControlError::Socket {
            worker,
            path: folder.path().to_owned(),
            source,
        };
        let (server, path) = IpcOneShotServer::new().map_err(failed)?;
        if !SocketFolder::fits(&path) {
            return Err(ControlError::Socket {
                worker,
                path: PathBuf::from(path),
                source: io::Error::from(io::ErrorKind::InvalidFilename),
            });
        }
        Ok(Self {
            worker,
            path,
            server,
        })
    }

    /// Where the worker connects.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Waits for the worker in a thread of its own and hands everything that comes to `deliver`.
    ///
    /// # Errors
    ///
    /// [`ControlError::System`] when no thread can be started.
    pub fn attend(
        self,
        deliver: impl Fn(Incoming) + Send + 'static,
    ) -> Result<Orders, ControlError> {
        let (sender, queue) = mpsc::channel();
        let opened = Arc::new(AtomicBool::new(false));
        let orders = Orders {
            queue: sender,
            path: self.path.clone(),
            opened: Arc::clone(&opened),
        };
        let Self { worker, server, .. } = self;
        spawn_thread(format!("hear {worker}"), move || {
            let accepted = server.accept();
            opened.store(true, Ordering::Release);
            let end = match accepted {
                Ok((
                    receiver,
                    FromWorker::Hello {
                        worker: who,
                        pid,
                        orders,
                    },
                )) if who == worker => {
                    deliver(Incoming::Hello { pid });
                    match spawn_thread(format!("tell {worker}"), move || tell(&orders, &queue)) {
                        Ok(()) => hear(&receiver, &deliver),
                        Err(error) => Some(error.to_string()),
                    }
                }
                Ok((_, other)) => Some(format!(
                    "the first message is not {worker}'s Hello but {other:?}"
                )),
                Err(IpcError::Disconnected) => None,
                Err(error) => Some(error.to_string()),
            };
            deliver(Incoming::Closed(end));
        })?;
        Ok(orders)
    }
}

fn spawn_thread(name: String, body: impl FnOnce() + Send + 'static) -> Result<(), ControlError> {
    let started = thread::Builder::new().name(name).spawn(body);
    started.map(drop).map_err(|source| ControlError::System {
        what: "starting a thread for a control channel",
        source,
    })
}

/// Delivers messages until the channel ends; the reason if that is not the worker's own end.
fn hear(receiver: &IpcReceiver<FromWorker>, deliver: &impl Fn(Incoming)) -> Option<String> {
    loop {
        match receiver.recv() {
            Ok(message) => deliver(Incoming::Message(message)),
            Err(IpcError::Disconnected) => return None,
            Err(IpcError::Io(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(IpcError::Io(error)) if error.kind() == io::ErrorKind::ConnectionReset => {
                return None;
            }
            Err(error) => return Some(error.to_string()),
        }
    }
}

/// Passes orders on until the worker or the launcher lets go.
fn tell(orders: &IpcSender<ToWorker>, queue: &mpsc::Receiver<ToWorker>) {
    while let Ok(order) = queue.recv() {
        if orders.send(order).is_err() {
            return;
        }
    }
}

/// Orders to one worker. They are queued, so giving one never blocks; those for a dead worker are dropped.
#[derive(Debug)]
pub struct Orders {
    queue: mpsc::Sender<ToWorker>,
    path: String,
    opened: Arc<AtomicBool>,
}

impl Orders {
    /// Queues an order.
    pub fn give(&self, order: ToWorker) {
        // The worker's death is noticed, and reported, by the supervisor.
        let _ = self.queue.send(order);
    }

    /// Ends the wait for a worker that died before it connected. `accept` has no deadline and cannot be
    /// cancelled, so this connects in the worker's place and hangs up.
    pub fn stop_waiting(&self) {
        if !self.opened.load(Ordering::Acquire) {
            drop(IpcSender::<FromWorker>::connect(self.path.clone()));
        }
    }
}
