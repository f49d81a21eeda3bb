//! GPUs: which, and how much of one.

use super::*;

#[test]
fn a_share_of_vram_is_of_what_the_gpu_has_free() {
    let config = parse("vram = \"50%\"\nram = \"1GiB\"").unwrap().resolve(&host()).unwrap();
    config.validate().unwrap();
    assert_eq!((config.vram_size(), config.warning()), (None, None));
    // Nothing is made up for the file that `--check` prints.
    let again = Settings::from(&config);
    assert_eq!((again.vram, again.nvme), (Some(Amount::Share(50)), None));
    assert_eq!(again.resolve(&host()).unwrap(), config);

    let settled = config.settled(Some((8 << 30) + 4095)).unwrap();
    assert_eq!(settled.vram_size(), Some(Size::gib(4)));
    assert_eq!((settled.vram_frames(), settled.spill_slots()), (2048, 1537));
    assert!(settled.warning().is_some());
    assert!(matches!(config.settled(None), Err(ConfigError::ShareOfSim)));
    let error = config.settled(Some(15 << 20)).unwrap_err();
    assert!(error.to_string().starts_with("vram is 6MiB, but needs at least 4 frames"), "{error}");

    let small = Config { nvme: Some(Size::gib(1)), ..config };
    small.validate().unwrap();
    assert!(matches!(small.settled(Some(8 << 30)), Err(ConfigError::NowhereToEvict { .. })));
}

#[test]
fn quotas_are_no_shares_of_a_share() {
    let quota = |line: &str| {
        let text = format!("vram = \"50%\"\n[[quota]]\nsubject = \"user:ada\"\n{line}\n");
        parse(&text).unwrap().resolve(&host())
    };
    for line in ["vram = \"50%\"", "vram_reserved = \"1%\"", "anonymous = \"2%\""] {
        let error = quota(line).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the quota of user:ada is a share, but vram is one as well: what it comes to is not known yet"
        );
        assert_eq!(error.fix(), "give vram as a size, such as 8GiB, or what the quota allows");
    }
    let config = quota("vram_reserved = \"1GiB\"").unwrap();
    config.validate().unwrap();
    config.settled(Some(8 << 30)).unwrap();
    assert!(matches!(config.settled(Some(2 << 30)), Err(ConfigError::QuotaReserves { .. })));
}

#[test]
fn a_real_gpu_plays_no_other() {
    let text = "device = \"cuda\"\nunified = true";
    let (message, fix) = refusal(&parse(text).unwrap().resolve(&host()).unwrap());
    assert_eq!(
        message,
        "unified is set, but that is for the sim device to play, and device is cuda"
    );
    assert_eq!(fix, "remove unified, or set device to sim");
    let share = parse("unified = true\nvram = \"50%\"").unwrap().resolve(&host());
    assert!(matches!(share, Err(ConfigError::ShareOfSim)));
}

#[test]
fn a_gpu_is_a_number_or_a_uuid() {
    let gpu = |text: &str| parse(text).map(|settings| settings.gpu);
    assert_eq!(gpu("gpu = 1").unwrap(), Some(GpuChoice::Ordinal(1)));
    assert_eq!(gpu("gpu = \"1\"").unwrap(), Some(GpuChoice::Ordinal(1)));
    assert_eq!(
        gpu("gpu = \"first\"").unwrap_err().to_string(),
        "/etc/lapis/lapisd.toml:1: gpu: `first` is no GPU; write a number such as 0, or a UUID as `nvidia-smi -L` \
         prints it"
    );
}
