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

-- What readers join, one row a measurement or a prediction.
CREATE VIEW measured AS
SELECT
    measurement.*,
    run.utc AS run_utc, run.command, run.compiler, run.versions,
    platform.name AS platform_name, platform.gpu AS platform_gpu, platform.gpus AS platform_gpus,
    platform.link AS platform_link, platform.sm_count AS platform_sm_count,
    platform.l2_bytes AS platform_l2_bytes, platform.power_limit_w AS platform_power_limit_w,
    platform.driver AS platform_driver, platform.cuda AS platform_cuda,
    config.method, config.canonical,
    kernel.hash AS kernel_hash, kernel.compiler AS kernel_compiler,
    kernel.registers AS kernel_registers, kernel.local_bytes AS kernel_local_bytes,
    kernel.smem_bytes AS kernel_smem_bytes,
    verification.passed, verification.seed, verification.relative_error,
    verification.worst_error, verification.nans, verification.bitwise_equal
FROM measurement
JOIN run ON run.id = measurement.run_id
JOIN platform ON platform.id = run.platform_id
JOIN config ON config.key = measurement.config_key
LEFT JOIN kernel ON kernel.id = measurement.kernel_id
LEFT JOIN verification ON verification.measurement_id = measurement.id;

CREATE VIEW predicted AS
SELECT
    prediction.*,
    run.utc AS run_utc, run.command, run.compiler, run.versions,
    platform.name AS platform_name, platform.gpu AS platform_gpu, platform.gpus AS platform_gpus,
    platform.link AS platform_link, platform.sm_count AS platform_sm_count,
    platform.l2_bytes AS platform_l2_bytes, platform.power_limit_w AS platform_power_limit_w,
    platform.driver AS platform_driver, platform.cuda AS platform_cuda,
    config.method, config.canonical
FROM prediction
JOIN run ON run.id = prediction.run_id
JOIN platform ON platform.id = run.platform_id
JOIN config ON config.key = prediction.config_key;
