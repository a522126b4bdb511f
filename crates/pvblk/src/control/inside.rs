//! [`Methods`]: the control methods for servers of this process.

use super::methods::{self, Call};
use super::rpc::{NO_METHOD, RpcError};
use super::server::{Reached, Shared};
use crate::hops::HopsQuery;
use serde_json::Value;
use std::sync::Arc;

/// The methods of the control protocol, without a socket. Clones are of the same process.
#[derive(Clone)]
pub struct Methods(pub(super) Arc<Shared>);

impl Methods {
    pub fn new(reached: Reached) -> Methods {
        Methods(Arc::new(Shared::new(reached)))
    }

    /// The things that the methods work on.
    pub fn reached(&self) -> &Reached {
        &self.0.reached
    }

    /// Calls a method that has one result. May wait as the method does.
    pub fn call(&self, method: &str, params: Value) -> Result<Value, RpcError> {
        match methods::find(method)? {
            Call::Quick(call) | Call::Slow(call) => call(&self.0, params),
            Call::Hops => methods::hops_once(&self.0, params),
            Call::Trace | Call::Events => {
                let text = format!("{method} is a stream: see docs/reference/control.md");
                Err(RpcError::new(NO_METHOD, text))
            }
        }
    }

    /// The question of a stream of hops.
    pub fn hops_query(&self, params: Value) -> Result<HopsQuery, RpcError> {
        methods::hops_query(&self.0, params)
    }
}
