//! A device over one other device.

use crate::{
    BlockDevice, Capabilities, DeviceQueue, Error, EventHub, Forwards, Limits, QueueContext,
};

/// A device over one other device, which it shows with some changes. Implementing this trait is enough to be
/// a [`BlockDevice`].
///
/// The limits, the capacity and the events are those of the device below unless the decorator has its own. No
/// capability is passed on, or hidden, by default: [`Decorator::forward`] decides about each, or doesn't
/// compile.
///
/// ```
/// # use pvblk_block::*;
/// # use std::sync::Arc;
/// struct Named(Arc<dyn BlockDevice>);
///
/// impl Decorator for Named {
///     fn inner(&self) -> &dyn BlockDevice {
///         &*self.0
///     }
///     fn describe(&self) -> String {
///         format!("named:{}", self.0.describe())
///     }
///     fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
///         self.0.open_device_queue(context)
///     }
///     fn forward<'a>(&'a self, inner: Capabilities<'a>) -> Forwards<'a> {
///         Forwards {
///             refresh: inner.refresh,
///             extents: inner.extents,
///             cached: inner.cached,
///             incarnation: inner.incarnation,
///             close: inner.close,
///             questions: inner.questions,
///             memory: inner.memory,
///             buffers: inner.buffers,
///         }
///     }
/// }
/// ```
///
/// A decorator with one capability forgotten doesn't compile (E0063):
///
/// ```compile_fail
/// # use pvblk_block::*;
/// # use std::sync::Arc;
/// # struct Named(Arc<dyn BlockDevice>);
/// # impl Decorator for Named {
/// #     fn inner(&self) -> &dyn BlockDevice {
/// #         &*self.0
/// #     }
/// #     fn describe(&self) -> String {
/// #         format!("named:{}", self.0.describe())
/// #     }
/// #     fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
/// #         self.0.open_device_queue(context)
/// #     }
///     fn forward<'a>(&'a self, inner: Capabilities<'a>) -> Forwards<'a> {
///         Forwards {
///             refresh: inner.refresh,
///             extents: inner.extents,
///             cached: inner.cached,
///             incarnation: inner.incarnation,
///             close: inner.close,
///             questions: inner.questions,
///             memory: inner.memory,
///         }
///     }
/// # }
/// ```
///
/// A decorator that leaves all others to `..` doesn't compile (E0308: the device below has capabilities, not
/// [`Forwards`]):
///
/// ```compile_fail
/// # use pvblk_block::*;
/// # use std::sync::Arc;
/// # struct Named(Arc<dyn BlockDevice>);
/// # impl Decorator for Named {
/// #     fn inner(&self) -> &dyn BlockDevice {
/// #         &*self.0
/// #     }
/// #     fn describe(&self) -> String {
/// #         format!("named:{}", self.0.describe())
/// #     }
/// #     fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
/// #         self.0.open_device_queue(context)
/// #     }
///     fn forward<'a>(&'a self, inner: Capabilities<'a>) -> Forwards<'a> {
///         Forwards { refresh: None, ..inner }
///     }
/// # }
/// ```
pub trait Decorator: Send + Sync {
    /// The device below.
    fn inner(&self) -> &dyn BlockDevice;

    fn describe(&self) -> String;

    fn floor(&self) -> String {
        self.describe()
    }

    fn limits(&self) -> Limits {
        self.inner().limits()
    }

    fn capacity_sectors(&self) -> u64 {
        self.inner().capacity_sectors()
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error>;

    fn events(&self) -> &EventHub {
        self.inner().events()
    }

    /// The capabilities of this device, given those of the device below.
    fn forward<'a>(&'a self, inner: Capabilities<'a>) -> Forwards<'a>;
}

impl<D: Decorator> BlockDevice for D {
    fn describe(&self) -> String {
        Decorator::describe(self)
    }

    fn floor(&self) -> String {
        Decorator::floor(self)
    }

    fn limits(&self) -> Limits {
        Decorator::limits(self)
    }

    fn capacity_sectors(&self) -> u64 {
        Decorator::capacity_sectors(self)
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Decorator::open_device_queue(self, context)
    }

    fn events(&self) -> &EventHub {
        Decorator::events(self)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        self.forward(self.inner().capabilities()).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        BufferSource, Buffers, CacheState, Cached, Close, Error, ErrorKind, Extent, ExtentKind,
        Extents, Incarnation, LossMarks, Questions, Reclaim, Refresh,
    };
    use pvblk_sys::Buffer;
    use std::sync::Arc;

    /// A device with all capabilities, or with none.
    #[derive(Default)]
    struct Able {
        events: EventHub,
        all: bool,
    }

    fn failed<T>(what: &str) -> Result<T, Error> {
        Err(Error::new(ErrorKind::Os, what))
    }

    impl BlockDevice for Able {
        fn describe(&self) -> String {
            "able".into()
        }
        fn limits(&self) -> Limits {
            Limits {
                max_sectors: 77,
                ..Limits::default()
            }
        }
        fn capacity_sectors(&self) -> u64 {
            99
        }
        fn open_device_queue(&self, _: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
            failed("open")
        }
        fn events(&self) -> &EventHub {
            &self.events
        }
        fn capabilities(&self) -> Capabilities<'_> {
            if !self.all {
                return Capabilities::none();
            }
            Capabilities {
                refresh: Some(self),
                extents: Some(self),
                cached: Some(self),
                incarnation: Some(self),
                close: Some(self),
                questions: Some(self),
                memory: Some(self),
                buffers: Some(self),
            }
        }
    }

    impl Refresh for Able {
        fn refresh(&self) -> Result<(), Error> {
            failed("refresh")
        }
    }

    impl Extents for Able {
        fn extents(&self, _: u64, _: u64, _: &mut Vec<Extent>) -> Result<(), Error> {
            failed("extents")
        }
    }

    impl Cached for Able {
        fn cached(&self, sector: u64, sectors: u64, out: &mut Vec<Extent<CacheState>>) {
            Extent::push(out, 0, sector, sector + sectors, CacheState::Dirty);
        }
    }

    impl LossMarks for Able {
        fn incarnation(&self) -> Incarnation {
            Incarnation {
                cache: Some(1),
                contents: Some(2),
            }
        }
    }

    impl Close for Able {
        fn close(&self) -> Result<(), Error> {
            failed("close")
        }
    }

    impl Questions for Able {
        fn ask(&self, question: &str) -> Option<Result<String, Error>> {
            Some(Ok(format!("you ask {question}")))
        }
    }

    impl Reclaim for Able {
        fn give_way(&self) -> u64 {
            3
        }
        fn spare_bytes(&self) -> u64 {
            4
        }
    }

    impl BufferSource for Able {
        fn allocate(&self, _: usize) -> Option<Buffer> {
            None
        }
        fn free(&self, _: Buffer) {}
    }

    impl Buffers for Able {
        fn buffer_source(&self) -> Arc<dyn BufferSource> {
            Arc::new(Able::default())
        }
    }

    /// A decorator that passes everything on, and has a name.
    struct Named(Arc<dyn BlockDevice>);

    impl Decorator for Named {
        fn inner(&self) -> &dyn BlockDevice {
            &*self.0
        }
        fn describe(&self) -> String {
            format!("named:{}", self.0.describe())
        }
        fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
            self.0.open_device_queue(context)
        }
        fn forward<'a>(&'a self, inner: Capabilities<'a>) -> Forwards<'a> {
            Forwards {
                refresh: inner.refresh,
                extents: inner.extents,
                cached: inner.cached,
                incarnation: inner.incarnation,
                close: inner.close,
                questions: inner.questions,
                memory: inner.memory,
                buffers: inner.buffers,
            }
        }
    }

    fn twice_named(all: bool) -> Arc<dyn BlockDevice> {
        let events = EventHub::default();
        let once: Arc<dyn BlockDevice> = Arc::new(Named(Arc::new(Able { events, all })));
        Arc::new(Named(once))
    }

    #[test]
    fn a_decorator_passes_everything_on() {
        let device = twice_named(true);
        assert_eq!(device.describe(), "named:named:able");
        assert_eq!(device.floor(), device.describe());
        assert_eq!(device.limits().max_sectors, 77);
        assert_eq!(device.capacity_sectors(), 99);
        let text = |result: Result<(), Error>| result.unwrap_err().to_string();
        let opened = device.open_device_queue(&QueueContext::new(1)).map(drop);
        assert_eq!(text(opened), "open");
        assert_eq!(text(device.refresh()), "refresh");
        assert_eq!(text(device.extents(0, 8, &mut vec![])), "extents");
        let mut cached = Vec::new();
        device
            .capabilities()
            .cached
            .unwrap()
            .cached(0, 8, &mut cached);
        assert_eq!(cached[0].kind, CacheState::Dirty);
        assert_eq!(text(device.close()), "close");
        assert_eq!(device.incarnation().cache, Some(1));
        assert_eq!(device.ask("why").unwrap().unwrap(), "you ask why");
        assert_eq!((device.give_way(), device.spare_bytes()), (3, 4));
        assert!(device.buffer_source().is_some());
    }

    #[test]
    fn a_missing_capability_has_one_meaning() {
        let device = twice_named(false);
        device.refresh().unwrap();
        device.close().unwrap();
        let mut found = Vec::new();
        device.extents(3, 5, &mut found).unwrap();
        let all = Extent {
            sector: 3,
            sectors: 5,
            kind: ExtentKind::Data,
        };
        assert_eq!(found, [all]);
        assert_eq!(device.incarnation(), Incarnation::default());
        assert!(device.ask("why").is_none() && device.buffer_source().is_none());
        assert_eq!((device.give_way(), device.spare_bytes()), (0, 0));
    }
}
