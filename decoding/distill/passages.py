"""Sentences, passages and characters that demo chat prompts rewrite, summarise or tell about."""

from __future__ import annotations

SENTENCES = (
    "The committee has decided to postpone the vote until further information is available.",
    "We kindly remind you that payment is due within fourteen days of receipt of the invoice.",
    "Your application was interesting, but we will not be taking it further this time.",
    "The medication should be administered twice daily, preferably after a meal.",
    "I want my money back because the shoes fell apart after one week.",
    "Due to unforeseen circumstances the concert will take place at another venue.",
    "He didn't do nothing wrong, and me and him was at home all evening.",
    "Photosynthesis converts light energy into chemical energy that is stored in glucose.",
    "The bus was late, it was raining, and I had forgotten my umbrella at home.",
    "Participants are required to submit the completed form prior to the start of the course.",
    "Send me the numbers now, I have been waiting since Monday.",
    "The defendant was acquitted because the evidence was deemed inadmissible.",
    "Our new phone is thinner, faster and lasts two full days on one charge.",
    "The train to the airport leaves every twenty minutes from platform four.",
    "Rising interest rates tend to reduce borrowing by households and firms.",
    "You never clean the kitchen, and I am tired of it.",
    "The old man sat on the bench and fed the pigeons, as he did every morning.",
    "Please refrain from using mobile devices for the duration of the performance.",
    "The server returned an error because the request did not contain a valid token.",
    "Although the results are promising, larger trials are needed to confirm them.",
    "There is several mistakes in this sentence who should of been corrected before.",
    "The lake is so clear that one can count the stones on its bottom.",
    "This meeting could have been an email.",
    "The warranty does not cover damage that results from improper use.",
    "She runs a small bakery at the corner and knows every customer by name.",
    "A quorum of two thirds of the members is needed to amend the statutes.",
    "Yesterday I go to the market and buyed five apple and a bread.",
    "The museum closes at six, but visitors may stay in the garden until sunset.",
    "Plate boundaries are zones where seismic activity is considerably elevated.",
    "I can't come tonight because something better turned up.",
    "The update fixes a fault that made the app crash when a photo was deleted.",
    "In view of the weather, the organisers advise spectators to bring warm clothing.",
)

PASSAGES = (
    "The town of Marlow opened its new library on Saturday. More than five hundred people came to "
    "the opening, and the mayor read a story to the children. The building cost less than planned "
    "because volunteers painted it. It is open every day except Monday, and membership is free.",
    "Honey never spoils when it is stored well. It contains little water and is slightly acidic, "
    "so bacteria cannot grow in it. Jars found in very old tombs were still edible. Crystals in "
    "honey are no sign of age: they melt again in warm water.",
    "Maria took over the farm from her parents ten years ago. At first she grew only wheat, but "
    "two dry summers made her try chickpeas and lavender. Today she sells soap and oil to shops "
    "in the city, and employs four people. She says that the bees came back, too.",
    "A new tram line will connect the station with the university from March on. It has nine "
    "stops and takes fourteen minutes. Buses on the same route will be cut by half. Students "
    "welcome the plan, while shop owners in the old town fear that fewer people will pass their "
    "windows.",
    "The first zips were sold for boots in the 1890s and often jammed. An engineer improved the "
    "design in 1913 by using many small interlocking teeth. Clothes makers were slow to trust it. "
    "Only in the 1930s did zips become common in trousers, jackets and bags.",
    "Our club met twice in June. We agreed to repair the boats before the regatta, to raise the "
    "fee by five euros, and to let guests row for free on the first Sunday of each month. Two "
    "members voted against the fee. The next meeting is on the ninth of July.",
    "Camels store fat in their humps, not water. The fat gives them energy when food is scarce. "
    "They lose little water because their body temperature may rise during the day. When they "
    "find a well, they can drink a hundred litres in about ten minutes.",
    "The company's sales rose by four percent last year, mainly because of orders from abroad. "
    "Profit fell, as energy and transport cost more. The board expects a difficult first half and "
    "plans no new shops. It wants to invest in repair services, which grew fastest.",
    "Lighthouses once had keepers who lived there with their families. They cleaned the lamp, "
    "kept a log and rang a bell in fog. From the 1960s on lamps were automated. Many towers are "
    "now hotels or museums, and some still guide ships at night.",
    "On the second day of the hike Jonas lost the path. He followed a stream downhill, as he had "
    "read in a book, and reached a hut after three hours. The owner gave him soup and a map. "
    "Since then he packs a compass, a whistle and a spare battery.",
    "Paper is made from fibres of wood. The wood is cut into chips and cooked until the fibres "
    "come apart. The wet pulp is spread on a moving screen, pressed and dried. Old paper can be "
    "made into new paper about six times before its fibres are too short.",
    "The survey asked two thousand adults how they get their news. Half of them named their phone "
    "first, a third television, and one in ten a printed newspaper. Older people trusted the news "
    "more than younger ones. Most said that they check a surprising story in a second place.",
    "Version 4 of the program starts twice as fast and needs less memory. Projects of version 3 "
    "open without changes, but not the other way round. The old export menu is gone; its "
    "functions are now in the share panel. Support for version 2 ends in October.",
    "The violin maker chooses wood that has dried for at least ten years. The front is spruce, "
    "the back maple. She taps each plate and listens before she removes another tenth of a "
    "millimetre. One instrument takes about two hundred hours, and the varnish a further month.",
    "In the valley the snow melts earlier than it did fifty years ago. Flowers open before the "
    "insects that feed on them have hatched. Some birds have begun to breed two weeks earlier. "
    "Others have not changed, and their numbers are falling.",
    "The school replaced its printed timetable by a screen in the hall. It shows rooms, absent "
    "teachers and the menu. Pupils like it, but on the second day a power cut left everybody "
    "looking for their classroom. A paper copy now hangs next to it.",
)

CHARACTERS = (
    *(
        "a lighthouse keeper",
        "a shy robot",
        "a retired detective",
        "a young baker",
        "a lost astronaut",
    ),
    *("a talking raven", "two rival gardeners", "a night-shift nurse", "a clumsy wizard"),
    *("a girl who collects maps", "a tired postman", "a curious fox", "an old clockmaker"),
    *("a bus driver with a secret", "a ghost in a library", "a boy who cannot lie"),
    *("a piano tuner", "a dragon with a cold", "the last beekeeper on an island"),
    *("a chess player", "a street musician", "an apprentice glassblower", "a stubborn goat"),
    *("a translator at a peace talk", "a child inventor", "a mountain guide"),
    *("a museum guard", "an actor who forgets lines", "a fisherman's daughter"),
    *("a snowman in spring", "a cook at the South Pole", "a spy who wants to retire"),
)

EVENTS = (
    *("finds a letter without an address", "wakes up in another century", "wins a strange prize"),
    *("has to keep a promise", "hears a voice from an old radio", "misses the last train"),
    *("discovers a door that was not there yesterday", "must choose between two friends"),
    *("meets an exact double", "plants a seed that grows overnight", "loses a precious key"),
    *("is invited to the wrong wedding", "learns to forgive a rival", "gets stuck in a lift"),
    *("follows footprints in the snow", "finds out that a map is wrong"),
    *("inherits a house full of clocks", "has one day to learn a dance", "saves a small theatre"),
    *("finds a diary in a language nobody knows", "is mistaken for somebody famous"),
    *("returns home after twenty years", "makes friends with a stranger on a ferry"),
    *("opens a shop that sells only one thing", "sees a shooting star fall nearby"),
    *("must cross a bridge that nobody trusts", "receives a call from a wrong number"),
    *("builds a boat in a cellar", "spends a night in an empty museum"),
    *("teaches an unusual pupil", "discovers an old recipe", "breaks a rule for a good reason"),
)
