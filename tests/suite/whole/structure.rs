//! The shape of the source: who may use whom, no circles, one meaning for each type name, `unsafe` in its
//! place.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The rooms in the order in which they may use each other: a room uses itself and those before it. A room is
/// a module of the crate, or of `engine`. `lib` uses all.
const ROOMS: &[&str] = &[
    "error",
    "numbers",
    "tensors",
    "model",
    "engine::kernel",
    "engine::memory",
    "engine::plan",
    "engine::route",
    "engine::cpu",
    "engine::reference",
    "engine::codegen",
    "engine::device",
    "engine::cuda",
    "engine::emulation",
    "engine::dispatch",
    "engine::functions",
    "engine::pieces",
    "engine::offload",
    "engine::reduce",
    "engine::commit",
    "engine",
    "rule",
    "rules",
    "wrappers",
    "stores",
    "ranks",
    "tree",
    "step",
    "training",
    "files",
    "printed",
    "guide",
];

/// A source file without comments, texts and unit tests.
struct Source {
    file: PathBuf,
    /// The path of its module.
    module: Vec<String>,
    code: String,
}

pub fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder)
        .expect("a source folder")
        .flatten()
        .map(|entry| entry.path());
    let mut files: Vec<_> = entries
        .flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] })
        .collect();
    files.sort();
    files
}

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../src")
}

fn sources() -> Vec<Source> {
    let root = root();
    let rust = files(&root)
        .into_iter()
        .filter(|file| file.extension().is_some_and(|extension| extension == "rs"));
    let source = |file: PathBuf| {
        let inside = file
            .strip_prefix(&root)
            .expect("a file below src")
            .with_extension("");
        let mut module: Vec<String> = inside
            .iter()
            .map(|part| part.to_string_lossy().into_owned())
            .collect();
        if module.last().is_some_and(|last| last == "mod" || last == "lib") {
            module.pop();
        }
        let text = std::fs::read_to_string(&file).expect("a source file");
        let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        Source {
            code: bare(text),
            file,
            module,
        }
    };
    rust.filter(|file| !file.ends_with("tests.rs"))
        .map(source)
        .collect()
}

/// The code of every source file.
pub(crate) fn all_code() -> Vec<String> {
    sources().into_iter().map(|source| source.code).collect()
}

/// The code without comments and the contents of texts.
fn bare(text: &str) -> String {
    let mut code = String::new();
    let mut rest = text;
    while let Some(start) = rest.find(['/', '"']) {
        code.push_str(&rest[..start]);
        rest = &rest[start..];
        if rest.starts_with("//") {
            rest = &rest[rest.find('\n').unwrap_or(rest.len())..];
        } else if rest.starts_with('"') && !code.ends_with('\'') {
            let mut end = 1;
            while !rest[end..].starts_with('"') {
                end += if rest[end..].starts_with('\\') {
                    2
                } else {
                    rest[end..].chars().next().map_or(1, char::len_utf8)
                };
            }
            code.push_str("\"\"");
            rest = &rest[end + 1..];
        } else {
            code.push_str(&rest[..1]);
            rest = &rest[1..];
        }
    }
    code + rest
}

fn is_word(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

/// The paths that begin at this place, with the groups of a `use` written out, and how long they are.
fn paths_at(code: &str) -> (Vec<Vec<String>>, usize) {
    let word = code.find(|letter| !is_word(letter)).unwrap_or(code.len());
    let (first, after) = (code[..word].to_string(), &code[word..]);
    let Some(next) = after.strip_prefix("::") else {
        return (vec![vec![first]], word);
    };
    let Some(group) = next.strip_prefix('{') else {
        let (inner, length) = paths_at(next);
        let paths = inner
            .into_iter()
            .map(|path| [vec![first.clone()], path].concat())
            .collect();
        return (paths, word + 2 + length);
    };
    let (mut paths, mut at) = (Vec::new(), 0);
    loop {
        at += group[at..]
            .find(|letter: char| is_word(letter) || letter == '}')
            .unwrap_or(group[at..].len());
        if group[at..].starts_with('}') || at >= group.len() {
            return (paths, word + 3 + at + 1);
        }
        let (inner, length) = paths_at(&group[at..]);
        paths.extend(inner.into_iter().map(|path| [vec![first.clone()], path].concat()));
        at += length;
    }
}

/// A path that a file uses, from the root of the crate, and whether it only hands it on.
struct Used {
    path: Vec<String>,
    is_reexport: bool,
}

/// All paths of a file into this crate: from `crate` or `super` on, in any position, or from a child module.
fn used(source: &Source, modules: &BTreeMap<Vec<String>, usize>) -> Vec<Used> {
    let mut all = Vec::new();
    let code = &source.code;
    let starts = code.char_indices().filter(|&(at, letter)| {
        is_word(letter) && !code[..at].ends_with(|before| is_word(before) || before == ':')
    });
    let starts: Vec<usize> = starts.map(|(at, _)| at).collect();
    let mut end = 0;
    for at in starts {
        if at < end {
            continue;
        }
        let (paths, length) = paths_at(&code[at..]);
        let statement = &code[code[..at].rfind([';', '}', '{']).map_or(0, |start| start + 1)..at];
        // Behind its attributes.
        let item = statement.rsplit(']').next().unwrap_or_default().trim_start();
        let is_reexport = item.starts_with("pub") && item.contains("use ");
        for path in paths.into_iter().filter(|path| path.len() > 1) {
            let base = |up: usize| source.module[..source.module.len().saturating_sub(up)].to_vec();
            let ups = path.iter().take_while(|part| *part == "super").count();
            let absolute = match path[0].as_str() {
                "crate" => path[1..].to_vec(),
                "super" => [base(ups), path[ups..].to_vec()].concat(),
                "self" => [base(0), path[1..].to_vec()].concat(),
                _ if modules.contains_key(&[base(0), vec![path[0].clone()]].concat()) => {
                    [base(0), path].concat()
                }
                _ => continue,
            };
            end = at + length;
            all.push(Used {
                path: absolute,
                is_reexport,
            });
        }
    }
    all
}

/// The index of the file that defines what a path names, through the files that hand it on.
fn definition(
    path: &[String],
    modules: &BTreeMap<Vec<String>, usize>,
    reexports: &[BTreeMap<String, Vec<String>>],
    depth: usize,
) -> Option<usize> {
    let length = (0..=path.len())
        .rev()
        .find(|length| modules.contains_key(&path[..*length]))?;
    let file = modules[&path[..length]];
    match path.get(length) {
        Some(name) if depth < 8 => match reexports[file].get(name) {
            Some(origin) => definition(
                &[origin, &path[length + 1..]].concat(),
                modules,
                reexports,
                depth + 1,
            ),
            None => Some(file),
        },
        _ => Some(file),
    }
}

/// For each file the files that it uses.
fn imports(sources: &[Source]) -> Vec<BTreeSet<usize>> {
    let modules: BTreeMap<Vec<String>, usize> = sources
        .iter()
        .enumerate()
        .map(|(index, source)| (source.module.clone(), index))
        .collect();
    let paths: Vec<Vec<Used>> = sources.iter().map(|source| used(source, &modules)).collect();
    let named = |used: &Used| Some((used.path.last()?.clone(), used.path.clone()));
    let handed_on = |used: &&Used| used.is_reexport;
    let reexports: Vec<BTreeMap<String, Vec<String>>> = paths
        .iter()
        .map(|paths| paths.iter().filter(handed_on).filter_map(named).collect())
        .collect();
    let of_file = |(index, paths): (usize, &Vec<Used>)| {
        let used = paths.iter().filter(|used| !used.is_reexport);
        used.filter_map(|used| definition(&used.path, &modules, &reexports, 0))
            .filter(|used| *used != index)
            .collect()
    };
    paths.iter().enumerate().map(of_file).collect()
}

/// The room of a module.
fn room(module: &[String]) -> String {
    match module {
        [first, second, ..] if first == "engine" => format!("{first}::{second}"),
        [first, ..] => first.clone(),
        [] => "lib".to_string(),
    }
}

#[test]
fn imports_go_one_way() {
    let sources = sources();
    let imports = imports(&sources);
    let place = |room: &str| {
        ROOMS
            .iter()
            .position(|name| *name == room)
            .unwrap_or_else(|| panic!("{room} is not listed"))
    };
    let mut wrong = BTreeSet::new();
    for (source, used) in sources.iter().zip(&imports) {
        let from = room(&source.module);
        if from == "lib" {
            continue;
        }
        for to in used.iter().map(|used| room(&sources[*used].module)) {
            // Macros are exported from the root, and files of the engine name it as the limit of their
            // visibility.
            let is_limit = to == "lib" || to == "engine" && from.starts_with("engine::");
            if !is_limit && place(&to) > place(&from) {
                wrong.insert(format!("{} uses {to}", source.file.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    let rooms: BTreeSet<String> = sources
        .iter()
        .map(|source| room(&source.module))
        .filter(|room| room != "lib")
        .collect();
    assert_eq!(rooms, ROOMS.iter().map(|room| room.to_string()).collect());
}

#[test]
fn no_file_uses_one_that_uses_it() {
    let sources = sources();
    let imports = imports(&sources);
    // The files that one reaches by going on from import to import.
    let reached = |start: usize| {
        let mut reached = BTreeSet::new();
        let mut next = vec![start];
        while let Some(file) = next.pop() {
            next.extend(imports[file].iter().filter(|used| reached.insert(**used)));
        }
        reached
    };
    let reached: Vec<BTreeSet<usize>> = (0..sources.len()).map(reached).collect();
    let mut circles = Vec::new();
    for (file, used) in imports.iter().enumerate() {
        let back = used.iter().filter(|used| reached[**used].contains(&file));
        circles.extend(back.map(|used| (&sources[file].file, &sources[*used].file)));
    }
    assert!(
        circles.is_empty(),
        "in circles of imports, each with one that it uses: {circles:#?}"
    );
    // The test reads imports at all.
    assert!(imports.iter().map(BTreeSet::len).sum::<usize>() > 400);
}

/// Names that are idioms: they mean the same thing wherever they stand.
const IDIOMS: &[&str] = &["Result", "World"];

/// The name of the type that a line of code defines, also in a macro or a function.
fn defined_type(line: &str) -> Option<&str> {
    let item = line.trim_start();
    let item = match item.strip_prefix("pub").map(str::trim_start) {
        Some(limited) if limited.starts_with('(') => limited.split_once(')')?.1,
        Some(public) => public,
        None => item,
    };
    let mut words = item.split_whitespace().filter(|word| *word != "unsafe");
    let (keyword, name) = (words.next()?, words.next()?);
    // A `type` that is indented belongs to a trait.
    let defines = ["struct", "enum", "trait", "union"].contains(&keyword)
        || keyword == "type" && !line.starts_with(' ');
    let name = &name[..name.find(|letter| !is_word(letter)).unwrap_or(name.len())];
    (defines && !name.is_empty()).then_some(name)
}

#[test]
fn a_type_name_means_one_thing() {
    let mut files: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for source in sources() {
        for name in source
            .code
            .lines()
            .filter_map(defined_type)
            .filter(|name| !IDIOMS.contains(name))
        {
            files
                .entry(name.to_string())
                .or_default()
                .push(source.file.clone());
        }
    }
    // Three that lines hide in their own way: in a macro, behind a limit of visibility, in a macro with one.
    for name in ["Scale", "Link", "Call"] {
        assert!(files.contains_key(name), "{name} is not found");
    }
    let twice: BTreeMap<_, _> = files.into_iter().filter(|(_, files)| files.len() > 1).collect();
    assert!(twice.is_empty(), "{twice:#?}");
}

#[test]
fn unsafe_code_stays_in_the_files_named_for_it() {
    for file in files(&root()) {
        let text = std::fs::read_to_string(&file).expect("a source file");
        let inside = file.strip_prefix(root()).expect("a file below src").to_path_buf();
        let folders = [
            "engine/cpu",
            "engine/cuda",
            "engine/emulation",
            "engine/kernel",
            "ranks/mpi",
            "ranks/nccl",
        ];
        let allowed =
            folders.iter().any(|folder| inside.starts_with(folder)) && text.contains("allow(unsafe_code)]");
        let lines: Vec<&str> = text.lines().collect();
        for (number, _) in lines
            .iter()
            .enumerate()
            .filter(|(_, line)| line.contains("unsafe {") || line.contains("unsafe impl"))
        {
            assert!(allowed, "{}", inside.display());
            let reason = lines[number.saturating_sub(8)..number]
                .iter()
                .any(|line| line.contains("// SAFETY: "));
            assert!(
                reason,
                "{}:{}: unsafe without a reason",
                inside.display(),
                number + 1
            );
        }
    }
}

/// Metal has no F64, not even to convert from: a scalar that is made there has to be rounded on the host
/// before.
#[test]
fn tensors_of_scalars_are_made_in_one_place() {
    for source in sources()
        .into_iter()
        .filter(|source| !source.file.ends_with("engine/memory/values.rs"))
    {
        let made: Vec<&str> = source
            .code
            .lines()
            .filter(|line| line.contains("Tensor::new(") || line.contains("Tensor::full("))
            .collect();
        assert!(made.is_empty(), "{}: {made:?}", source.file.display());
    }
}
