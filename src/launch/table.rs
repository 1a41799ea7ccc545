//! Every option there is: its name, default, range and help are here and nowhere else.

use super::flags::Fallback::{Is, Later, OrDemo};
use super::flags::{Flag, Group, Kind};

const fn int(min: u64, max: u64) -> Kind {
    Kind::Int { min, max }
}

const fn real(min: f64, max: f64) -> Kind {
    Kind::Real {
        min,
        max,
        open: false,
    }
}

const fn above(min: f64, max: f64) -> Kind {
    Kind::Real {
        min,
        max,
        open: true,
    }
}

/// The largest count that the ring's words hold (budget: 26 bits).
const ANCHORS: u64 = (1 << 26) - 1;
const MANY: u64 = u32::MAX as u64;

// Options that several commands take.

const GPUS: Flag = Flag::new(
    "gpus",
    "LIST",
    Kind::Text,
    Later("all visible ones, unless --cpu is given or there are none"),
    "GPUs to use, such as 0-3,6; numbers count the visible ones",
);
const CHAT_TEMPLATE: Flag = Flag::new(
    "chat-template",
    "FILE",
    Kind::Text,
    Later("the model's own"),
    "Chat template (Jinja) in place of the model's",
);
const ASSUME_TIED: Flag = Flag::new(
    "assume-tied",
    "",
    Kind::Switch,
    Is(""),
    "Use the embedding as head when the model has no lm_head and does not say that they are tied",
);
const TEMPLATE_KWARG: Flag = Flag::new(
    "template-kwarg",
    "K=V",
    Kind::KeyValue,
    Later("none"),
    "A variable for the chat template; V is read as JSON where it can be",
)
.many();
const MIN_LOSS_TOKENS: Flag = Flag::new(
    "min-loss-tokens",
    "N",
    int(1, MANY),
    Is("2"),
    "Documents with fewer supervised tokens are skipped",
);
const LAST_TURN_ONLY: Flag = Flag::new(
    "last-turn-only",
    "",
    Kind::Switch,
    Is(""),
    "Supervise only the last assistant turn",
);
const RAW_TEXT: Flag = Flag::new(
    "raw-text",
    "",
    Kind::Switch,
    Is(""),
    "No chat template: rows hold a `text`, all of it supervised, or texts on lines of their own",
);
const TEMPERATURE: Flag = Flag::new(
    "temperature",
    "T",
    real(0.0, 100.0),
    Is("0"),
    "Draw tokens at this temperature; 0 takes the most likely one",
);
const DRAW_SEED: Flag = Flag::new(
    "seed",
    "N",
    int(0, i64::MAX as u64),
    Is("0"),
    "Seed of the draws",
);

/// The options of a run.
pub static TRAIN: &[Group] = &[
    Group {
        heading: "Places",
        flags: &[
            Flag::new(
                "cpu",
                "T:D",
                Kind::Pair,
                Is("2:2"),
                "CPU places: T targets and D drafters",
            ),
            GPUS,
            Flag::new(
                "split",
                "T:D",
                Kind::Pair,
                Later("1:1 on one GPU, else what is predicted to be fastest; `launcher plan` shows it"),
                "T targets and D drafters on the GPUs; roles may share a GPU, two drafters may not",
            ),
            Flag::new(
                "targets",
                "LIST",
                Kind::Text,
                Later("see --split"),
                "GPUs of the targets, one each, such as 0-4; with --drafters",
            ),
            Flag::new(
                "drafters",
                "LIST",
                Kind::Text,
                Later("see --split"),
                "GPUs of the drafters, one each, such as 5-7; with --targets, whose GPUs they may share",
            ),
        ],
    },
    Group {
        heading: "Target",
        flags: &[
            Flag::new(
                "target-model",
                "DIR|REPO",
                Kind::Text,
                Later("the built-in demo model, if no data is given either"),
                "The frozen model: a Hugging Face directory, or a name such as Qwen/Qwen3-8B or owner/name@revision, fetched into the cache of Hugging Face's tools",
            ),
            Flag::new(
                "load-format",
                "FORMAT",
                Kind::Word(&["auto", "dummy"]),
                Is("auto"),
                "auto: the model's files; dummy: random weights from its config.json, for measuring speed",
            ),
            CHAT_TEMPLATE,
            ASSUME_TIED,
        ],
    },
    Group {
        heading: "Drafter",
        flags: &[
            Flag::new(
                "draft-config",
                "FILE",
                Kind::Text,
                Later("sizes of the target"),
                "Sizes of the drafter: a config.json",
            ),
            Flag::new(
                "draft-layers",
                "L",
                int(1, 64),
                OrDemo("5", "2"),
                "Layers of the drafter",
            ),
            Flag::new(
                "block-size",
                "B",
                int(2, 64),
                OrDemo("16", "8"),
                "Slots of a block; the first holds the anchor",
            ),
            Flag::new(
                "target-layers",
                "1,9,…",
                Kind::Ints,
                Later("spread evenly, one for each drafter layer; demo: 1,3,5"),
                "Target layers to capture, from 0, in rising order",
            ),
            Flag::new(
                "sliding-window",
                "W",
                int(1, MANY),
                Later("full attention"),
                "Sliding-window attention of this many positions in the drafter",
            ),
            Flag::new(
                "mask-token-id",
                "ID",
                int(0, MANY),
                Later("an unused row of the embedding"),
                "Token that fills the masked slots",
            ),
            Flag::new(
                "init-from",
                "CHECKPOINT",
                Kind::Text,
                Later("random, from the seed"),
                "Start from this drafter's weights",
            ),
        ],
    },
    Group {
        heading: "Data",
        flags: &[
            Flag::new(
                "data",
                "FILE…",
                Kind::Text,
                Later("the built-in demo conversations, if no model is given either"),
                "Conversations: JSON lines (plain, gzip or zstd) or Parquet, or folders of them",
            )
            .many(),
            Flag::new(
                "data-weights",
                "W…",
                above(0.0, 1000.0),
                Later("1 each"),
                "How often the documents of each path of --data appear in an epoch; 0.5: half of them, drawn by --seed",
            )
            .many(),
            Flag::new(
                "eval-data",
                "FILE…",
                Kind::Text,
                Later("a share of the data"),
                "Held-out conversations",
            )
            .many(),
            Flag::new(
                "eval-fraction",
                "X",
                real(0.0, 0.5),
                OrDemo("0.01", "0.05"),
                "Share of the documents held out (at least 16) when --eval-data is not given; 0 holds out none",
            ),
            Flag::new(
                "eval-tokens",
                "N",
                int(0, MANY),
                Is("65536"),
                "Most tokens held out",
            ),
            TEMPLATE_KWARG,
            Flag::new(
                "max-length",
                "N",
                int(8, 1 << 20),
                Is("3072"),
                "Longest document in tokens; the rest is cut off and its share reported",
            ),
            MIN_LOSS_TOKENS,
            LAST_TURN_ONLY,
            RAW_TEXT,
            Flag::new(
                "seed",
                "N",
                int(0, i64::MAX as u64),
                Is("0"),
                "Seed of the order, the anchors and the first weights",
            ),
        ],
    },
    Group {
        heading: "Training",
        flags: &[
            Flag::new(
                "epochs",
                "N",
                int(1, 10_000),
                OrDemo("1", "4"),
                "Passes over the data",
            ),
            Flag::new(
                "max-steps",
                "N",
                int(1, (1 << 24) - 1),
                Later("no limit"),
                "Stop, saved, after this step of the run, counted over resumes",
            ),
            Flag::new(
                "time-limit",
                "TIME",
                Kind::Time,
                Later("no limit"),
                "Stop, saved, after this long: seconds, or with s, m, h, d",
            ),
            Flag::new(
                "batch-anchors",
                "N",
                int(1, ANCHORS),
                OrDemo("16384", "96"),
                "Anchors of a step, all drafters together",
            ),
            Flag::new(
                "anchors",
                "A",
                int(1, 1 << 20),
                OrDemo("512", "24"),
                "Most anchors of a document",
            ),
            Flag::new(
                "lr",
                "X",
                above(0.0, 1.0),
                OrDemo("6e-4", "3e-3"),
                "Peak learning rate",
            ),
            Flag::new(
                "schedule",
                "NAME",
                Kind::Word(&["constant", "cosine", "wsd"]),
                Is("cosine"),
                "Shape of the learning rate",
            ),
            Flag::new(
                "warmup",
                "X",
                real(0.0, 1.0),
                Is("0.04"),
                "Share of the run over which the rate rises",
            ),
            Flag::new(
                "weight-decay",
                "X",
                real(0.0, 1.0),
                Is("0.01"),
                "Decoupled weight decay",
            ),
            Flag::new(
                "clip",
                "X",
                real(0.0, f64::INFINITY),
                Is("1.0"),
                "Largest L2 norm of the gradient; 0 turns clipping off",
            ),
        ],
    },
    Group {
        heading: "Loss",
        flags: &[
            Flag::new(
                "gamma",
                "X",
                real(0.0, f64::INFINITY),
                Is("7"),
                "Slot k weighs exp(-(k-1)/gamma); 0 turns it off",
            ),
            Flag::new(
                "streak-alpha",
                "X",
                real(0.0, 1.0),
                Is("0"),
                "Slots count by how likely the run before them survives; 0 turns it off",
            ),
            Flag::new(
                "dpace-alpha",
                "X",
                real(0.0, 1.0),
                Later("off"),
                "D-PACE weights",
            ),
            Flag::new(
                "use-soft-labels",
                "",
                Kind::Switch,
                Is(""),
                "Learn the target's distribution too; its final hidden states then travel as well",
            ),
            Flag::new(
                "kl-temperature",
                "X",
                above(0.0, 100.0),
                Is("1"),
                "Temperature of the soft labels",
            ),
            Flag::new(
                "kl-weight",
                "X",
                real(0.0, 1.0),
                Is("0.5"),
                "Share of the soft labels in the loss",
            ),
            Flag::new(
                "cap-lambda",
                "X",
                real(0.0, f64::INFINITY),
                Is("0"),
                "Weight of the entropy on slots that are already right",
            ),
        ],
    },
    Group {
        heading: "Ring",
        flags: &[
            Flag::new(
                "ring-slots",
                "N",
                int(2, 65_536),
                Later(
                    "what the largest step, the prefetches and the targets need, and a quarter more",
                ),
                "Slots of the ring; fewer than are needed are refused with the numbers",
            ),
            Flag::new(
                "slot-tokens",
                "N",
                int(8, 1 << 24),
                OrDemo("4096", "512"),
                "Tokens at which a unit of work is closed",
            ),
            Flag::new(
                "unit-anchors",
                "N",
                int(1, ANCHORS),
                OrDemo("1024", "48"),
                "Anchors at which a unit of work is closed",
            ),
            Flag::new(
                "prefill-tokens",
                "N",
                int(1, 1 << 24),
                OrDemo("16384", "1024"),
                "Most tokens of one target forward",
            ),
            Flag::new(
                "check-payload",
                "",
                Kind::Switch,
                Is(""),
                "Check a sum over every payload on both sides of the ring",
            ),
        ],
    },
    Group {
        heading: "Output",
        flags: &[
            Flag::new(
                "output",
                "DIR",
                Kind::Text,
                Later(
                    "runs/NAME, or the first of runs/NAME-2, … that is free; NAME is demo or the data's",
                ),
                "Where the run's files go",
            ),
            Flag::new(
                "overwrite",
                "",
                Kind::Switch,
                Is(""),
                "Remove an earlier run's files from the output directory",
            ),
            Flag::new(
                "save-every",
                "N",
                int(1, MANY),
                Later("only at the end"),
                "Checkpoint every N steps",
            ),
            Flag::new("keep", "N", int(1, MANY), Is("3"), "Checkpoints kept"),
            Flag::new(
                "eval-every",
                "N",
                int(1, MANY),
                Later("before and after"),
                "Evaluate on the held-out documents every N steps",
            ),
            Flag::new(
                "resume",
                "",
                Kind::Switch,
                Is(""),
                "Go on from the latest checkpoint in the output directory",
            ),
            Flag::new(
                "replay",
                "FILE",
                Kind::Text,
                Later("whoever is free takes the next"),
                "Give each drafter the units that this trained.jsonl lists for it",
            ),
        ],
    },
    Group {
        heading: "Watching and faults",
        flags: &[
            Flag::new(
                "quiet",
                "",
                Kind::Switch,
                Is(""),
                "Print only warnings and the report",
            ),
            Flag::new(
                "show",
                "ROLE:RANK,…",
                Kind::Workers,
                Later("none"),
                "Copy these workers' logs to the console, whole lines under their names",
            )
            .many(),
            Flag::new(
                "metrics-port",
                "[ADDRESS:]PORT",
                Kind::Text,
                Later("none"),
                "Serve metrics for Prometheus at http://127.0.0.1:PORT/metrics, or at another address",
            ),
            Flag::new(
                "tensorboard",
                "",
                Kind::Switch,
                Is(""),
                "Also write TensorBoard event files, to the output's tensorboard/",
            ),
            Flag::new(
                "restarts",
                "N",
                int(0, 0),
                Is("0"),
                "Restarts of dead workers; a death ends the run in this build",
            ),
            Flag::new(
                "no-quarantine",
                "",
                Kind::Switch,
                Is(""),
                "Give a unit out again however many workers died on it",
            ),
            Flag::new(
                "wait-for-debugger",
                "ROLE:RANK,…|all",
                Kind::Text,
                Later("none"),
                "These workers wait for a debugger before they load: `launcher attach RUN ROLE:RANK`",
            )
            .many(),
            Flag::new(
                "debugger-prefix",
                "ROLE:RANK=COMMAND",
                Kind::KeyValue,
                Later("none"),
                "Start this worker through a command on the launcher's terminal, such as drafter:0='gdb --args'; Ctrl-C is the debugger's too",
            )
            .many(),
        ],
    },
];

/// Where one process computes.
static PLACE: [Flag; 2] = [
    Flag::new(
        "cpu",
        "",
        Kind::Switch,
        Is(""),
        "Compute on the CPU, whatever GPUs there are",
    ),
    GPUS,
];

/// The options of `launcher eval`.
pub static EVAL: &[Group] = &[
    Group {
        heading: "Places",
        flags: &PLACE,
    },
    Group {
        heading: "Options",
        flags: &[
            Flag::new(
                "target-model",
                "DIR|REPO",
                Kind::Text,
                Later("the run's"),
                "The frozen model",
            ),
            Flag::new(
                "prompts",
                "FILE…",
                Kind::Text,
                Later("the run's held-out documents"),
                "Conversations to take prompts from, up to their first answer; each file is a set of its own",
            )
            .many(),
            Flag::new(
                "chat-template",
                "FILE",
                Kind::Text,
                Later("the run's"),
                "Chat template (Jinja)",
            ),
            Flag::new(
                "documents",
                "N",
                int(1, MANY),
                Is("256"),
                "Most prompts of a set",
            ),
            Flag::new(
                "tree",
                "N,N,…",
                Kind::Ints,
                Later("only the chain"),
                "Also decode with draft trees of so many nodes, 1 to 4096",
            )
            .many(),
            Flag::new(
                "max-new-tokens",
                "N",
                int(1, MANY),
                Is("256"),
                "Longest answer in tokens",
            ),
            TEMPERATURE,
            DRAW_SEED,
            Flag::new(
                "output",
                "DIR",
                Kind::Text,
                Later("eval in the run's or the checkpoint's directory"),
                "Where eval.json and the plots go",
            ),
            Flag::new(
                "json",
                "FILE",
                Kind::Text,
                Later("none"),
                "Also write the figures here",
            ),
            Flag::new("quiet", "", Kind::Switch, Is(""), "Print only the figures"),
        ],
    },
];

/// The options of `launcher generate`.
pub static GENERATE: &[Group] = &[
    Group {
        heading: "Places",
        flags: &PLACE,
    },
    Group {
        heading: "Who answers",
        flags: &[
            Flag::new(
                "target-model",
                "DIR|REPO",
                Kind::Text,
                Later("the built-in demo model, unless --endpoint is given"),
                "The model that answers: a Hugging Face directory or the name of a model on a hub",
            ),
            CHAT_TEMPLATE,
            TEMPLATE_KWARG,
            ASSUME_TIED,
            Flag::new(
                "endpoint",
                "URL",
                Kind::Text,
                Later("none: the model answers here"),
                "Ask this OpenAI-compatible server instead, such as http://localhost:8000/v1; a key is taken from OPENAI_API_KEY",
            ),
            Flag::new(
                "model",
                "NAME",
                Kind::Text,
                Later("the first that the server lists"),
                "The server's name of the model",
            ),
        ],
    },
    Group {
        heading: "Answers",
        flags: &[
            Flag::new(
                "prompts",
                "FILE…",
                Kind::Text,
                Later("the demo's conversations, if no model is given either"),
                "Conversations to answer, one JSON object a line; answers in them are made anew, turn by turn",
            )
            .many(),
            Flag::new(
                "samples",
                "N",
                int(1, 1 << 20),
                Is("1"),
                "Answers to each conversation; more than one needs a temperature",
            ),
            Flag::new(
                "limit",
                "N",
                int(1, MANY),
                Later("all"),
                "Take only the first N conversations",
            ),
            Flag::new(
                "max-new-tokens",
                "N",
                int(1, MANY),
                Is("512"),
                "Longest answer in tokens",
            ),
            Flag::new(
                "max-length",
                "N",
                int(8, 1 << 20),
                Is("3072"),
                "Longest conversation in tokens, answers included",
            ),
            TEMPERATURE,
            DRAW_SEED,
        ],
    },
    Group {
        heading: "Speed",
        flags: &[
            Flag::new(
                "batch",
                "N",
                int(1, 4096),
                Later("256 on a GPU, 16 on a CPU"),
                "Sequences at a time on each device",
            ),
            Flag::new(
                "prefill-tokens",
                "N",
                int(1, 1 << 24),
                Is("4096"),
                "Tokens of a forward beyond which no further prompt begins in it",
            ),
            Flag::new(
                "concurrency",
                "N",
                int(1, 4096),
                Is("32"),
                "Requests at a time, with --endpoint",
            ),
            Flag::new(
                "retries",
                "N",
                int(0, 1000),
                Is("6"),
                "Further tries of a request after a failure that may pass, with --endpoint; waits double from half a second to half a minute",
            ),
            Flag::new(
                "timeout",
                "TIME",
                Kind::Time,
                Is("10m"),
                "Longest wait for an answer, with --endpoint",
            ),
        ],
    },
    Group {
        heading: "Output",
        flags: &[
            Flag::new(
                "output",
                "FILE",
                Kind::Text,
                Later("generated.jsonl"),
                "Where the answered conversations go, one JSON object a line",
            ),
            Flag::new(
                "resume",
                "",
                Kind::Switch,
                Is(""),
                "Keep what the file holds and make what is missing",
            ),
            Flag::new(
                "overwrite",
                "",
                Kind::Switch,
                Is(""),
                "Replace the file",
            ),
            Flag::new(
                "quiet",
                "",
                Kind::Switch,
                Is(""),
                "Print only warnings and the result",
            ),
        ],
    },
];

/// The options of `launcher check-data`.
pub static CHECK_DATA: &[Group] = &[Group {
    heading: "Options",
    flags: &[
        Flag::new(
            "target-model",
            "DIR",
            Kind::Text,
            Later("the built-in demo model"),
            "The model whose tokenizer and chat template are used",
        ),
        CHAT_TEMPLATE,
        TEMPLATE_KWARG,
        Flag::new(
            "max-length",
            "N",
            int(8, 1 << 20),
            Is("3072"),
            "Longest document in tokens",
        ),
        MIN_LOSS_TOKENS,
        LAST_TURN_ONLY,
        RAW_TEXT,
        Flag::new(
            "rows",
            "N,N,…",
            Kind::Ints,
            Later("the first three documents"),
            "Rows to show with ids, text and mask, counted from 0 over all files, blank lines aside",
        ),
        Flag::new(
            "json",
            "",
            Kind::Switch,
            Is(""),
            "Print one JSON object instead, without rows unless --rows is given",
        ),
    ],
}];

/// The options of `launcher export`.
pub static EXPORT: &[Group] = &[Group {
    heading: "Options",
    flags: &[Flag::new(
        "overwrite",
        "",
        Kind::Switch,
        Is(""),
        "Write into a directory that is not empty",
    )],
}];
