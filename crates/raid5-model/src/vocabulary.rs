//! Macros for the lists of a model: the steps of its traces, and the bugs that can be planted.

macro_rules! steps {
    ($(#[$doc:meta])* $($step:ident $(($arg:ident))? $text:literal $about:literal)*) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        pub enum Step {
            $(#[doc = $about] $step $(($arg))?,)*
        }

        impl Step {
            /// Name in a trace, and number.
            fn parts(self) -> (&'static str, Option<u8>) {
                match self {
                    $(Step::$step $(($crate::vocabulary::number!($arg n)))? => ($text, $crate::vocabulary::number_of!($($arg n)?)),)*
                }
            }

            /// The step that a line of a trace names: the name, and a number if the step has one.
            pub fn read(line: &str) -> Option<Step> {
                let (name, number) = match line.trim().rsplit_once(' ') {
                    Some((name, number)) if number.parse::<u8>().is_ok() => (name, number.parse().ok()),
                    _ => (line.trim(), None),
                };
                $(if name == $text {
                    return $crate::vocabulary::read_as!(Step::$step, number $(, $arg)?);
                })*
                None
            }

        }

        impl $crate::machine::Vocabulary for Step {
            const WORDS: &[(&str, &str)] = &[$(($text, $about)),*];

            fn kind(self) -> usize {
                let name = self.parts().0;
                Self::WORDS.iter().position(|(word, _)| *word == name).unwrap_or(0)
            }

            fn is_free(self) -> bool {
                self.is_up_to_others()
            }
        }

        impl std::fmt::Display for Step {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self.parts() {
                    (name, Some(n)) => write!(f, "{name} {n}"),
                    (name, None) => f.write_str(name),
                }
            }
        }
    };
}

macro_rules! number {
    ($arg:ident $n:ident) => {
        $n
    };
}
macro_rules! number_of {
    () => {
        None
    };
    ($arg:ident $n:ident) => {
        Some($n)
    };
}
macro_rules! read_as {
    ($step:expr, $number:ident) => {
        $number.is_none().then_some($step)
    };
    ($step:expr, $number:ident, $arg:ident) => {
        $number.map($step)
    };
}

macro_rules! bugs {
    ($(#[$doc:meta])* $($bug:ident $name:literal $property:ident $within:literal $about:literal)*) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Bug {
            $(#[doc = $about] $bug,)*
        }

        impl Bug {
            /// All bugs, in the order of the page.
            pub const ALL: &[Bug] = &[$(Bug::$bug),*];

            /// Name on the command line.
            pub const fn name(self) -> &'static str {
                match self { $(Bug::$bug => $name,)* }
            }

            /// The bug with this name.
            pub fn named(name: &str) -> Option<Bug> {
                Bug::ALL.iter().copied().find(|b| b.name() == name)
            }

            /// One sentence that says what goes wrong.
            pub const fn about(self) -> &'static str {
                match self { $(Bug::$bug => $about,)* }
            }

            /// Words of the bound in which the bug shows itself soon.
            const fn within(self) -> &'static str {
                match self { $(Bug::$bug => $within,)* }
            }

            /// The property that the bug breaks first.
            pub const fn breaks(self) -> $crate::check::Property {
                match self { $(Bug::$bug => $crate::check::Property::$property,)* }
            }
        }
    };
}

pub(crate) use {bugs, number, number_of, read_as, steps};
