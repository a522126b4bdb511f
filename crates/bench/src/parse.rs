//! fio's job files.

use super::options::{self, Applied};
use super::spec::JobSpec;
use pvblk_block::Error;

/// Jobs of a file or of flags.
#[derive(Clone, Debug, Default)]
pub struct Jobs {
    /// One entry for each section except `[global]`, in order.
    pub jobs: Vec<JobSpec>,
    /// Options of `[global]`, as they were written.
    pub global: Vec<(String, String)>,
    /// Names of options that have no effect here, each once.
    pub ignored: Vec<String>,
}

/// Reads the common subset of fio's job files; `file` is its name for messages.
///
/// There are sections `[global]` and `[name]`, comments after `;` or `#`, and `${VARIABLE}` from the
/// environment. An option that isn't known, or whose value isn't, is an error in one line that names file and
/// line.
pub fn parse_jobs(text: &str, file: &str) -> Result<Jobs, Error> {
    parse_with(text, file, |name| std::env::var(name).ok())
}

fn parse_with(
    text: &str,
    file: &str,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Jobs, Error> {
    let mut out = Jobs::default();
    let mut global = JobSpec::new("global");
    let mut current: Option<JobSpec> = None;
    let mut in_section = false;
    for (n, raw) in text.lines().enumerate() {
        let bad = |why: String| Error::config(format!("{file}:{}: {why}", n + 1));
        let line = raw.split([';', '#']).next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        if let Some(name) = line.strip_prefix('[') {
            let name = name
                .strip_suffix(']')
                .ok_or_else(|| bad(format!("{line:?}: a section is [name]")))?;
            out.jobs.extend(current.take());
            in_section = true;
            if name.eq_ignore_ascii_case("global") {
                continue;
            }
            current = Some(JobSpec {
                name: name.to_owned(),
                options: Vec::new(),
                ..global.clone()
            });
            continue;
        }
        if !in_section {
            return Err(bad(format!("{line:?} stands before any [section]")));
        }
        let line = expand(line, &variable).map_err(bad)?;
        let (name, value) = match line.split_once('=') {
            Some((name, value)) => (name.trim(), Some(value.trim())),
            None => (line.as_str(), None),
        };
        let spec = current.as_mut().unwrap_or(&mut global);
        set(spec, &mut out.ignored, name, value).map_err(bad)?;
    }
    out.jobs.extend(current.take());
    out.global = global.options;
    if out.jobs.is_empty() {
        return Err(Error::config(format!(
            "{file}: there is no job: a section such as [job1] makes one"
        )));
    }
    Ok(out)
}

/// Sets an option of `spec` and keeps it for reports; errors name the option.
fn set(
    spec: &mut JobSpec,
    ignored: &mut Vec<String>,
    name: &str,
    value: Option<&str>,
) -> Result<(), String> {
    let applied = options::apply(spec, name, value).map_err(|why| format!("{name}: {why}"))?;
    if applied == Applied::Ignored && !ignored.iter().any(|n| n == name) {
        ignored.push(name.to_owned());
    }
    let value = value.unwrap_or("1").to_owned();
    spec.options.push((name.to_owned(), value));
    Ok(())
}

impl Jobs {
    /// One job from options such as `rw=randread` (or only a name, for switches).
    pub fn from_options<'a>(options: impl IntoIterator<Item = &'a str>) -> Result<Jobs, Error> {
        let mut jobs = Jobs {
            jobs: vec![JobSpec::new("job")],
            ..Jobs::default()
        };
        options.into_iter().try_for_each(|o| jobs.set_all(o))?;
        Ok(jobs)
    }

    /// Sets an option such as `runtime=10` in all jobs, whatever their sections say.
    pub fn set_all(&mut self, option: &str) -> Result<(), Error> {
        let (name, value) = match option.split_once('=') {
            Some((name, value)) => (name.trim(), Some(value.trim())),
            None => (option.trim(), None),
        };
        for job in &mut self.jobs {
            set(job, &mut self.ignored, name, value).map_err(Error::config)?;
        }
        Ok(())
    }
}

/// Replaces `${VARIABLE}` by its value.
fn expand(line: &str, variable: &impl Fn(&str) -> Option<String>) -> Result<String, String> {
    let mut out = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((before, after)) = rest.split_once("${") {
        let (name, tail) = after
            .split_once('}')
            .ok_or_else(|| format!("{line:?}: a variable is ${{NAME}}"))?;
        out.push_str(before);
        let value = variable(name)
            .ok_or_else(|| format!("the variable {name} is not set: set it in the environment"))?;
        out.push_str(&value);
        rest = tail;
    }
    out.push_str(rest);
    Ok(out)
}

#[cfg(test)]
#[path = "parse_tests.rs"]
mod tests;
