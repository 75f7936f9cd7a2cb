from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from ddp_hydra.config import redact
from ddp_hydra.config.schema import Config

CONF = Path(__file__).parents[3] / "conf"


@pytest.mark.parametrize(
    "name",
    [
        "password",
        "cluster.auth.token",
        "apiKey",
        "client_key",
        "a/secret",
        "dbPassword",
        "aws_access_key_id",
        "key",
        "tls_api_key",
        "ssl_access_key",
        "db_pass",
        "smtpPass",
        "BANK_PIN",
        "passcode",
        "otp",
        "login.user_otp",
        "MY_DATABASE_PASS",
        "email_pass",
        "simPin",
        "api_keys",
        "access_tokens",
        "authTokens",
        "secrets",
        "passwords",
        "secretkey",
        "accesskey",
        "authtoken",
        "awssecretkey",
        "AWSSESSIONTOKEN",
        "dbsecretkey",
        "userapitoken",
        "npmauthtoken",
        "oauthclientsecret",
        "awsSecretAccesskeys",
        "clientsecret",
        "apikey2",
        "storage_primary_key",
        "primary_access_key",
        "group_access_token",
        "image_api_key",
        "apikeys",
        "apikey_prod",
        "apikey_value",
        "apikeyid",
        "clientapikeys",
        "client_apikeys",
        "client_api_keys",
        "secretaccesskey",
    ],
)
def test_what_is_called_like_a_secret(name):
    assert redact.named_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "data.n", "model.keys", "tokens_seen", "monkey", "key_value_heads", "pad_token", "label_key", "tls_client_key",
        "DASK_DISTRIBUTED__COMM__TLS__CLIENT__KEY", "ssl_key", "ssl_key_file", "private_key_path", "passwordFile",
        "api_token_file", "client_keys", "ssl_keyfile", "credentials_path", "key_filename",
        "pass", "pin", "passes", "compass", "pin_memory", "low_pass", "forward_pass", "pass_at_1", "mapping", "options",
        "max_pass", "min_pass", "train_pass", "val_pass", "render_pass", "filter_pass", "led_pin", "gpio_pin",
        "reset_pin", "otp_ratio", "passcode_length", "db_pass_rate", "pass_db", "db.pass",
        "tokens", "keys", "n_tokens", "num_tokens", "max_tokens", "max_new_tokens", "token_ids", "tokenizer",
        "stop_tokens", "special_tokens", "tokens_per_s", "num_keys", "hotkey", "primary_key", "group_key",
        "key_of_table", "key_column", "column_key", "api_keys_path", "signatures", "robotkey", "assigntoken",
    ],
)  # fmt: skip
def test_what_is_not(name):
    assert not redact.named_secret(name)


def test_one_key_of_ours_is_called_like_a_secret():
    files = [OmegaConf.to_container(OmegaConf.load(path)) for path in CONF.rglob("*.yaml")]
    keys = {part for file in files for key, _ in redact.values_of(file) for part in key.split(".")}
    schemas = OmegaConf.to_container(OmegaConf.structured(Config), enum_to_str=True)
    keys |= {part for key, _ in redact.values_of(schemas) for part in key.split(".")}
    assert sorted(filter(redact.named_secret, keys)) == ["auth"]


def test_the_name_of_a_key_file_stays_and_a_private_key_itself_is_hidden():
    pem = "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\n"
    security = {"tls_client_key": "../tls/me.key", "tls_client_cert": "me.pem"}
    typed = ["cluster.security.tls_client_key=../tls/me.key", "cluster.security={tls_client_key: me.key, a: b}"]
    assert redact.without([security, *typed]) == [security, *typed]
    assert redact.without({"tls_client_key": pem, "client_keys": [pem]}) == {
        "tls_client_key": "***",
        "client_keys": ["***"],
    }
    words = [f"cluster.security.tls_client_key='{pem}'", f"+a={{client_keys: ['{pem}']}}", f"key is {pem}"]
    assert redact.without(words) == ["cluster.security.tls_client_key=***", "+a=***", "***"]
    assert redact.secret_line(f"tls_client_key: |\n  {pem}") == "  -----BEGIN RSA PRIVATE KEY-----"
    assert redact.secret_line("tls_client_key: ../tls/me.key") is None


def test_the_files_of_hydra_go_without_secrets(tmp_path):
    config = {
        "tracker": {"password": "top-secret", "url": "https://me:top-secret@host/x?sig=top-secret", "token": None},
        "store": {"key": "${oc.env:STORE_KEY}", "n": 3, "auth": True},
    }
    overrides = [
        "optimizer.lr=0.1", "+tracker.password=top-secret", "+url=https://me:top-secret@host",
        "+urls=[https://top-secret@host, ftp://me:top-secret@host]", "results.root=sftp://me@host:22/runs",
        "data.source=https://host/x.json?v=1&X-Amz-Signature=top-secret", "store.key='${oc.env:STORE_KEY}'",
    ]  # fmt: skip
    hydra = {"hydra": {"job": {"override_dirname": "optimizer.lr=0.1,+tracker.password=top-secret"}}}
    files = {}
    for name, content in (("config", config), ("overrides", overrides), ("hydra", hydra)):
        path = tmp_path / f"{name}.yaml"
        OmegaConf.save(OmegaConf.create(content), path)
        redact.rewrite(path)
        files[path.name] = path.read_text()
        assert files[path.name] == redact.yaml_text(OmegaConf.create(content))
        assert "top-secret" not in files[path.name]
    kept = OmegaConf.to_container(OmegaConf.create(files["config.yaml"]))
    assert kept == {
        "tracker": {"password": "***", "url": "https://***@host/x?sig=***", "token": None},
        "store": {"key": "${oc.env:STORE_KEY}", "n": 3, "auth": True},
    }
    assert list(redact.hidden(kept)) == ["tracker.password", "tracker.url"]
    assert OmegaConf.create(files["overrides.yaml"]) == [
        "optimizer.lr=0.1", "+tracker.password=***", "+url=https://***@host",
        "+urls=[https://***@host, ftp://***@host]", "results.root=sftp://me@host:22/runs",
        "data.source=https://host/x.json?v=1&X-Amz-Signature=***", "store.key='${oc.env:STORE_KEY}'",
    ]  # fmt: skip
    same = tmp_path / "same.yaml"
    same.write_text("a: 1   # as it was\n")
    redact.rewrite(same)
    redact.rewrite(tmp_path / "not_there.yaml")
    assert same.read_text() == "a: 1   # as it was\n"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("+data.options={key:top-secret,secret:'top-secret'}", "+data.options={key:***,secret:***}"),
        ("cluster.environment={WANDB_API_KEY:top-secret,N:3}", "cluster.environment={WANDB_API_KEY:***,N:3}"),
        ('data.headers={Authorization:"Bearer top-secret"}', "data.headers={Authorization:***}"),
        ('a=[{"b": {"x-api-key": "top-secret"}}, {c: [1, 2]}]', 'a=[{"b": {"x-api-key": ***}}, {c: [1, 2]}]'),
        ("a={credentials:{user:me,word:top-secret},n:1}", "a={credentials:***,n:1}"),
        ("a={key:${oc.env:KEY},b:${secret:name}}", "a={key:${oc.env:KEY},b:${secret:name}}"),
        ("url=Protocol=https;Name=x;AccountKey=top-secret==", "url=Protocol=https;Name=x;AccountKey=***"),
        ("a=1,url=AccountKey=top-secret==;Name=x", "a=1,url=AccountKey=***;Name=x"),
        ("a=1,password=top;secret", "a=1,password=***"),
        (r"a={password: 'b\'c,d', n: 1}", "a={password: ***, n: 1}"),
        (r"a={password: b\,c\}d, n: 1}", "a={password: ***, n: 1}"),
        (r'a=1,password="b\"c,d",n=2', "a=1,password=***,n=2"),
        (r"a=1,password=b\,c\ d,n=2", "a=1,password=***,n=2"),
        ("a={secrets: {hf: x}, api_keys: [x, y]}", "a={secrets: ***, api_keys: ***}"),
        ("password='${oc.env:PW,hunter2}'", "password=***"),
        ("a={password:${oc.env:PW,hunter2},n:1}", "a={password:***,n:1}"),
        ("password=${oc.env:PW,${oc.env:OTHER,hunter2}}", "password=***"),
        ("a={password:${oc.env:PW,null},n:1}", "a={password:${oc.env:PW,null},n:1}"),
        ("password=${oc.env:PW, ${oc.env:OTHER, ''}}", "password=${oc.env:PW, ${oc.env:OTHER, ''}}"),
    ],
)
def test_secrets_are_found_inside_a_value(text, left):
    assert redact.without([text]) == [left]


@pytest.mark.parametrize(
    "word",
    [
        "model.d_key=64", "+model.n_token=-0.5", "model.d_key=1,2", "model.d_key=[8,16]", "model.extra_key=range(1,9)",
        "model.d_key=tag(log,int(interval(4, 64)))", "model={d_key: 8, n_token: 1e-3}", "model.d_key=range(1,stop=9)",
        "a=1,d_key=8,n=2", "model.d_key=[]", "model.d_key=[8,16],[8,32]", "a=1,d_key=[8,16],n=2", "d_key=null,0.00012",
        "d_key=choice(8,16,32,64)", "n_token=12.500", "d_key=sort(shuffle(8, 16))",
    ],
)  # fmt: skip
def test_a_few_numbers_of_five_digits_are_no_keys_nor_tokens(word):
    assert redact.without([word]) == [word]


@pytest.mark.parametrize(
    "word",
    [
        "password=1", "db.pin_password=12", "bank_pin=1234", "otp=123", "secret=0", "auth.pwd=12", "api_key=123456",
        "token=100000", "api_key=1,123456", "token=007", "token='12'", "token=a12", "token=1a", "token=[1,x]",
        "token=0x12", "token=12-34", "token=1 a", "apikey=1", "key={a: 1}",
        # Bytes of a key, and numbers in groups.
        "data.private_key=[174,47,154,16]", "data_key=[174,47,154,16,5]", "encryption_key=[1,2]", "token=1,2,3,4,5",
        "key=[[1,2],[3,4]]", "recovery_key=12345 67890 12345 67890", "token=12345 67890 12345", "key=12 34,56",
        # More digits than a size of a model has.
        "api_key=0.8472618273645182", "token=0.847261", "key=12345.678901234567", "key=[0.8472618273645182]",
        "key=1e123456", "key=123[456]", "key=12(34)",
        # Words of a sweep without a number.
        "token=start", "api_key=tag", "key=log", "key=true", "key=[null]", "key=int()",
    ],
)  # fmt: skip
def test_other_numbers_and_all_texts_of_secrets_are_hidden(word):
    assert redact.without([word]) == [f"{word.partition('=')[0]}=***"]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a=1,private_key=[174,47,154,16],n=2", "a=1,private_key=***,n=2"),
        ("a=1,key=[[17,4],[7,154]],n=2", "a=1,key=***,n=2"),
        ("a=1,key={b: [1, x], c: d},n=2", "a=1,key=***,n=2"),
        ("a=1,password='b, c',n='token=d e'", "a=1,password=***,n='token=*** e'"),
        ("tags=[key={key: 123456}, [[[1]]]]", "tags=[key={key: ***}, [[[1]]]]"),
        ("a=1,tags=[b,token=c,key=[1,x]],n=2", "a=1,tags=[b,token=***,key=***],n=2"),
        ("a=1,token=12345 67890 12345,n=2", "a=1,token=***,n=2"),
        ("a={key: [174,47,154,16,5], n: 1}", "a={key: ***, n: 1}"),
        ("a={key: [[17,4],[7,154]], n: 1}", "a={key: ***, n: 1}"),
    ],
)
def test_all_numbers_of_a_secret_inside_a_value_are_hidden(text, left):
    assert redact.without([text]) == [left]


@pytest.mark.parametrize(
    "config",
    [
        {"data": {"private_key": [174, 47]}},
        {"key": [174, 47, 154, 16, 5]},
        {"key": [[174, 47], [154, 16]]},
        {"key": [True]},
        {"token": 0.8472618273645182},
        {"token": "12345 67890"},
    ],
)
def test_numbers_in_a_config_that_may_be_a_key_are_hidden(config):
    assert "***" in redact.yaml_text(config)


@pytest.mark.parametrize(
    "line",
    [
        "token: 12345 67890 12345",
        "access_token: 1,234567",
        "token: 1,234567",
        "token: 1, x",
        "token: 1,x",
        "{n: 1, token: 1,x}",
        "a: {key: x, d_key: [1, 2]}",
        "key: {a: 1}",
        "key: [174, 47, 154, 16, 5]",
        "key: [1, x]",
        "key = [174, 47, 154, 16, 5]",
        '{"private_key": [174, 47], "n": 1}',
        "sets: [{n: 1}, {password: x}]",
        "sets: [password: x]",
        "n: 1, password: x",
    ],
)
def test_a_line_of_a_file_with_numbers_of_a_secret_is_found(line):
    assert redact.secret_line(f"a: 1\n{line}\n") == line


def test_the_default_of_a_variable_in_a_line_of_a_file_is_found():
    assert redact.secret_line("password: ${oc.env:PW,hunter2}") is not None
    for value in ("${oc.env:PW}", "${oc.env:PW,null}", "${oc.env:PW,''}", "${oc.env:PW,${oc.env:OTHER}}"):
        assert redact.secret_line(f"password: {value}") is None


def test_words_joined_by_any_separator_go_where_one_is_a_secret():
    job = {"override_dirname": "optimizer.lr:0.1;tracker.password:top-secret"}
    for words in (["optimizer.lr=0.1", "tracker.password=top-secret"], ["optimizer.lr=0.1"]):
        saved = redact.yaml_text({"hydra": {"job": job, "overrides": {"task": words}}})
        assert ("top-secret" in saved) == (len(words) == 1)


def test_a_line_of_a_file_with_a_small_number_is_none():
    lines = [
        "d_key: 8",
        '{"d_key": [8, 16], "n_token": 5, "b": 1}',
        "d_key = [1, 2]",
        "d_key: []",
        "key: [",
        '  "d_key": 8,',
    ]
    assert redact.secret_line("\n".join(lines)) is None


def test_a_number_in_a_config_is_shown_where_one_that_is_typed_is():
    config = {"d_key": 8, "n_token": [1, 2.5], "extra_key": None, "api_key": 123456, "password": 1}
    texts = {"token": "12", "key": ["12"], "auth": {"key": 1}}
    shown = redact.without({**config, **texts})
    assert shown == {**config, "api_key": "***", "password": "***", "token": "***", "key": "***", "auth": "***"}
    assert redact.secret_line("model:\n  d_key: 8\n  n_token: [1, 2]") is None
    assert redact.secret_line("a: 1\nd_key: '8'") == "d_key: '8'"


@pytest.mark.parametrize("default", ["64", " 5", "true", "null", "${n}", ""])
def test_a_short_number_is_no_secret_as_a_default_either(default):
    reads = {"d_key": f"${{oc.env:DK,{default}}}", "pad_token": f"${{oc.select:x,{default}}}"}
    assert redact.without(reads) == reads
    assert redact.is_secret("password", f"${{oc.env:PW,{default}}}") == default.strip().isdigit()


def test_a_default_that_may_be_a_secret_is_hidden():
    texts = ("${oc.env:T,hunter2}", "${oc.env:${name},hunter2}", "${oc.env:T,1234567}", "${oc.env:A,1}${oc.env:B,x}")
    assert all(redact.is_secret("token", text) for text in texts)


def test_a_config_is_written_as_omegaconf_writes_it():
    """But for the places where long lines are broken."""
    values = ["1e-3", "null", "yes", "0x1", "~", "a: b", "${x}", "é\n", " x ", "1_000", "off", "#", "", "2026-11-25"]
    config = OmegaConf.create({"text": values, "n": 1, "x": 1e-3, "none": None, "flag": True, "in": {"a": [{}, []]}})
    assert redact.yaml_text(config) == OmegaConf.to_yaml(config)


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONF)))
def test_no_secret_is_seen_in_the_configs_that_ship(path):
    """Each job's config holds the text of --help; one secret in it, and all is parsed anew by OmegaConf, in 0.1 s."""
    config = OmegaConf.to_container(OmegaConf.load(path))
    assert redact.without(config) == config
