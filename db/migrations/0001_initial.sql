-- Identity is columns; units are in the names; nothing is pickled (lists and maps are JSON text).
-- A table's UNIQUE columns are its natural key: an insert of a known row finds that row.

CREATE TABLE platform (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    gpu TEXT NOT NULL,
    gpus INTEGER NOT NULL,
    link TEXT NOT NULL,
    sm_count INTEGER NOT NULL,
    l2_bytes INTEGER NOT NULL,
    power_limit_w INTEGER NOT NULL,
    driver TEXT NOT NULL,
    cuda TEXT NOT NULL,
    UNIQUE (name, gpu, gpus, link, sm_count, l2_bytes, power_limit_w, driver, cuda)
);

-- One start of a command that measures or simulates. Medians of different runs are not compared.
CREATE TABLE run (
    id INTEGER PRIMARY KEY,
    platform_id INTEGER NOT NULL REFERENCES platform (id),
    utc TEXT NOT NULL,
    command TEXT NOT NULL,
    compiler TEXT NOT NULL,
    versions TEXT NOT NULL,
    UNIQUE (platform_id, utc, command, compiler, versions)
);

CREATE TABLE kernel (
    id INTEGER PRIMARY KEY,
    hash TEXT NOT NULL,
    compiler TEXT NOT NULL,
    registers INTEGER NOT NULL,
    local_bytes INTEGER NOT NULL,
    smem_bytes INTEGER NOT NULL,
    UNIQUE (hash, compiler, registers, local_bytes, smem_bytes)
);

-- `key` is the digest of `canonical`, the config as canonical JSON.
CREATE TABLE config (
    key TEXT PRIMARY KEY,
    method TEXT NOT NULL,
    canonical TEXT NOT NULL UNIQUE
);

-- One row a trial, whatever came of it. `trial` counts from 1 inside a run.
CREATE TABLE measurement (
    id INTEGER PRIMARY KEY,
    run_id INTEGER NOT NULL REFERENCES run (id),
    trial INTEGER NOT NULL,
    utc TEXT NOT NULL,
    protocol INTEGER NOT NULL,
    m INTEGER NOT NULL,
    k INTEGER NOT NULL,
    h INTEGER NOT NULL,
    n INTEGER NOT NULL,
    gpus INTEGER NOT NULL,
    dtype TEXT NOT NULL,
    activation TEXT NOT NULL,
    output TEXT NOT NULL,
    config_key TEXT NOT NULL REFERENCES config (key),
    kernel_id INTEGER REFERENCES kernel (id),
    load TEXT NOT NULL CHECK (load IN ('sustained', 'burst')),
    cache TEXT NOT NULL CHECK (cache IN ('cold', 'warm')),
    phase TEXT NOT NULL CHECK (phase IN ('screen', 'final')),
    outcome TEXT NOT NULL CHECK (
        outcome IN ('ok', 'invalid', 'compile_error', 'launch_error', 'wrong', 'timeout', 'throttled')
    ),
    detail TEXT NOT NULL,
    latency_us REAL,
    low_us REAL,
    high_us REAL,
    samples_us TEXT NOT NULL,
    floor_us REAL,
    single_shot_us REAL,
    gpu_state TEXT NOT NULL,
    UNIQUE (run_id, trial)
);
CREATE INDEX measurement_shape ON measurement (m, k, h, n);
CREATE INDEX measurement_config ON measurement (config_key);

-- An error that is not a number is NULL (SQLite has no NaN).
CREATE TABLE verification (
    measurement_id INTEGER PRIMARY KEY REFERENCES measurement (id),
    passed INTEGER NOT NULL CHECK (passed IN (0, 1)),
    seed INTEGER NOT NULL,
    relative_error REAL,
    worst_error REAL,
    nans INTEGER NOT NULL,
    bitwise_equal INTEGER CHECK (bitwise_equal IN (0, 1))
);

-- Computed by a model, also by a simulator; another kind of row than a measurement.
CREATE TABLE prediction (
    id INTEGER PRIMARY KEY,
    run_id INTEGER NOT NULL REFERENCES run (id),
    utc TEXT NOT NULL,
    m INTEGER NOT NULL,
    k INTEGER NOT NULL,
    h INTEGER NOT NULL,
    n INTEGER NOT NULL,
    gpus INTEGER NOT NULL,
    dtype TEXT NOT NULL,
    activation TEXT NOT NULL,
    output TEXT NOT NULL,
    config_key TEXT NOT NULL REFERENCES config (key),
    model TEXT NOT NULL,
    latency_us REAL NOT NULL,
    low_us REAL NOT NULL,
    high_us REAL NOT NULL
);
CREATE INDEX prediction_shape ON prediction (m, k, h, n);

-- What readers need, joined. A column's name is the path of its field in ctatune's Row.
CREATE VIEW described_run AS
SELECT
    run.id AS "run.id", run.utc AS "run.utc", run.command AS "run.command",
    run.compiler AS "run.compiler", run.versions AS "run.versions",
    platform.name AS "run.platform.name", platform.gpu AS "run.platform.gpu",
    platform.gpus AS "run.platform.gpus", platform.link AS "run.platform.link",
    platform.sm_count AS "run.platform.sm_count", platform.l2_bytes AS "run.platform.l2_bytes",
    platform.power_limit_w AS "run.platform.power_limit_w",
    platform.driver AS "run.platform.driver", platform.cuda AS "run.platform.cuda"
FROM run
JOIN platform ON platform.id = run.platform_id;

CREATE VIEW measurement_row AS
SELECT
    measurement.id, measurement.trial, measurement.utc, measurement.protocol,
    described_run.*,
    measurement.m AS "problem.m", measurement.k AS "problem.k", measurement.h AS "problem.h",
    measurement.n AS "problem.n", measurement.gpus AS "problem.gpus",
    measurement.dtype AS "problem.dtype",
    measurement.activation AS "problem.activation", measurement.output AS "problem.output",
    config.canonical AS config,
    measurement.load AS "measurement.regime.load", measurement.cache AS "measurement.regime.cache",
    measurement.phase AS "measurement.phase",
    measurement.outcome AS "measurement.outcome",
    measurement.detail AS "measurement.detail",
    measurement.latency_us AS "measurement.latency_us",
    measurement.low_us AS "measurement.low_us",
    measurement.high_us AS "measurement.high_us",
    measurement.samples_us AS "measurement.samples_us",
    measurement.floor_us AS "measurement.floor_us",
    measurement.single_shot_us AS "measurement.single_shot_us",
    measurement.gpu_state AS "measurement.gpu_state",
    kernel.hash AS "measurement.kernel.hash",
    kernel.compiler AS "measurement.kernel.compiler",
    kernel.registers AS "measurement.kernel.registers",
    kernel.local_bytes AS "measurement.kernel.local_bytes",
    kernel.smem_bytes AS "measurement.kernel.smem_bytes",
    verification.passed AS "measurement.verification.passed",
    verification.seed AS "measurement.verification.seed",
    verification.relative_error AS "measurement.verification.relative_error",
    verification.worst_error AS "measurement.verification.worst_error",
    verification.nans AS "measurement.verification.nans",
    verification.bitwise_equal AS "measurement.verification.bitwise_equal"
FROM measurement
JOIN described_run ON described_run."run.id" = measurement.run_id
JOIN config ON config.key = measurement.config_key
LEFT JOIN kernel ON kernel.id = measurement.kernel_id
LEFT JOIN verification ON verification.measurement_id = measurement.id;

CREATE VIEW prediction_row AS
SELECT
    prediction.id, prediction.utc,
    described_run.*,
    prediction.m AS "problem.m", prediction.k AS "problem.k", prediction.h AS "problem.h",
    prediction.n AS "problem.n", prediction.gpus AS "problem.gpus",
    prediction.dtype AS "problem.dtype",
    prediction.activation AS "problem.activation", prediction.output AS "problem.output",
    config.canonical AS config,
    prediction.model AS "prediction.model",
    prediction.latency_us AS "prediction.latency_us",
    prediction.low_us AS "prediction.low_us",
    prediction.high_us AS "prediction.high_us"
FROM prediction
JOIN described_run ON described_run."run.id" = prediction.run_id
JOIN config ON config.key = prediction.config_key;
